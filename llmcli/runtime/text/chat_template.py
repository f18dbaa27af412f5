"""Render conversations to prompts with the model's own chat template (Jinja). The template is
untrusted input, so it runs in a sandbox with limits (jinja_sandbox.py).

A conversation is given to the template as the client sent it. If the template refuses that, fails,
or leaves out a text, other layouts of the conversation are tried (conversation_layout.py). A prompt
without one of the texts is never returned.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from llmcli.errors import UserError
from llmcli.runtime.text.conversation_layout import (
    AS_SENT,
    ConversationLayout,
    apply_layout,
    layouts_with,
    possible_changes,
    template_values,
)
from llmcli.runtime.text.conversation_sources import (
    TOOL_VARIABLES,
    TextSource,
    TrackedConversation,
    track_conversation,
)
from llmcli.runtime.text.jinja_sandbox import TemplateError, make_environment
from llmcli.runtime.text.template_budget import (
    MAX_CHARACTERS,
    RenderingClock,
    TemplateBudget,
    TemplateBudgetExceeded,
)
from llmcli.runtime.text.tracked_text import ClientList, TrackedText, join_texts, track
from llmcli.types import Message

if TYPE_CHECKING:
    import jinja2

# Template variables that turn thinking on or off, and their values for both. "enable_thinking" is
# the name in Qwen3 and most other templates, "thinking" the name in DeepSeek and Granite.
THINKING_SWITCHES: dict[str, tuple[Any, Any]] = {
    "enable_thinking": (True, False),
    "thinking": (True, False),
    "think": (True, False),
    "reasoning": (True, False),  # Command A
    "thinking_option": ("on", "off"),  # Ling
    "thinking_mode": ("enabled", "disabled"),  # MiniMax-M3
}
# Variables with today's date, as in llama-server, for templates that read them.
DATE_FORMATS = {"datetime": "%b %d %Y", "date_string": "%d %b %Y"}
TOOL_TEMPLATE, DOCUMENT_TEMPLATE = "tool_use", "rag"
TEMPLATE_HINT = "use --raw for no template, or --chat-template FILE for another one"
BYTE_ORDER_MARK = "\ufeff"
# Conversations that show whether a template expects the content of their last message with this
# role as a list of parts.
PART_PROBES: dict[str, tuple[Message, ...]] = {
    "user": (Message("user", "hello"),),
    "assistant": (Message("user", "hello"), Message("assistant", "yes"), Message("user", "and?")),
    "system": (Message("system", "be kind"), Message("user", "hello")),
    "tool": (
        Message("user", "hello"),
        Message(
            "assistant",
            "",
            {
                "tool_calls": [
                    {
                        "id": "call00000",
                        "type": "function",
                        "function": {"name": "clock", "arguments": '{"zone": "utc"}'},
                    }
                ]
            },
        ),
        Message("tool", "noon", {"tool_call_id": "call00000", "name": "clock"}),
    ),
}


class TemplateFailure(UserError):
    """Raised when a template refuses a conversation, fails, or leaves out some of its texts.
    Another layout of the conversation may succeed. `losses`: the texts that were left out.
    """

    def __init__(self, message: str, losses: Sequence[TextSource] = ()) -> None:
        super().__init__(message, hint=TEMPLATE_HINT)
        self.losses = tuple(losses)


class ChatTemplate:
    """A model's chat template, compiled when it is first rendered."""

    def __init__(
        self, source: str, *, bos: str = "", eos: str = "", named: Mapping[str, str] | None = None
    ) -> None:
        """`source`: the Jinja text. `bos`, `eos`: the texts of the tokens that start and end a
        sequence, which the template may write. `named`: further templates of the file by name, such
        as "tool_use".
        """
        self.source, self.bos, self.eos = source.removeprefix(BYTE_ORDER_MARK), bos, eos
        self.named = dict(named or {})
        # whether the template tells the model to think; None leaves it to the template
        self.reasoning: bool | None = None
        self._compiled: jinja2.Template | None = None
        self._defect = ""  # why it cannot be compiled; "" if it can, or was not tried
        self._accepts_system: bool | None = None  # None until it is known
        self._budget = TemplateBudget()
        self._expects_parts = dict[str, bool]()  # by role
        # by possible changes: the layout that was successful; whether a template writes no calls
        self._remembered = dict[tuple[str, ...], ConversationLayout]()
        self._hopeless = set[tuple[str, ...]]()
        self._named_templates = dict[str, ChatTemplate]()

    def select(self, *, has_tools: bool = False, has_documents: bool = False) -> "ChatTemplate":
        """Return the template for a conversation with functions or documents: a named template of
        the file, or this one.
        """
        name = TOOL_TEMPLATE if has_tools else DOCUMENT_TEMPLATE if has_documents else ""
        if name not in self.named:
            return self
        selected = self._named_templates.setdefault(
            name, ChatTemplate(self.named[name], bos=self.bos, eos=self.eos)
        )
        selected.reasoning = self.reasoning
        return selected

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continues_last: bool = False,
        clock: RenderingClock | None = None,
    ) -> TrackedText:
        """Return the prompt for `messages`. Its spans are the texts that are not the template's own
        words. `variables`: values of further template variables, such as `tools`; a client chooses
        their names. `add_generation_prompt`: end the prompt with the start of an assistant's
        message. `continues_last`: end it after the text of the last message. `clock`: of this and
        all other attempts to render the conversation; None: a new one.

        Raises UserError when the template fails, exceeds its limits, refuses the messages, or
        leaves out one of them.
        """
        variables = {
            name: value
            for name, value in (variables or {}).items()
            if value is not None or name not in TOOL_VARIABLES
        }
        conversation = track_conversation(messages, variables)
        changes = possible_changes(
            conversation.messages, has_tools=not TOOL_VARIABLES.isdisjoint(variables)
        )
        failures = list[TemplateFailure]()
        self._budget.start_prompt(clock)
        # the rest of the time is for other ways to write the conversation
        min_seconds_left = self._budget.clock.read_seconds_left() / 2
        for layout in self._layouts(changes):
            try:
                prompt = self._render_checked(conversation, layout, add_generation_prompt)
            except TemplateFailure as error:
                failures.append(error)
                if (
                    changes in self._hopeless
                    or self._budget.clock.read_seconds_left() < min_seconds_left
                ):
                    break
                continue
            if layout != AS_SENT:
                self._remembered[changes] = layout
            if continues_last:
                return prompt.cut(0, conversation.last_content_end(prompt))
            return prompt
        else:  # all layouts were tried
            if any(loss.kind in ("call", "arguments") for loss in failures[0].losses):
                self._hopeless.add(changes)
        raise failures[0]

    def render_as_sent(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> TrackedText:
        """Return the prompt for exactly these messages, even if the template leaves out some of
        them. Raises UserError as `render` does for a template that fails.
        """
        conversation = track_conversation(messages, {})
        self._budget.start_prompt()
        return self._render_layout(
            conversation, AS_SENT, self._part_roles(messages), add_generation_prompt
        )

    def check(self) -> None:
        """Raise UserError when the template cannot be compiled. Nothing is rendered."""
        self._template()

    def thinking_values(self, reasoning: bool | None) -> dict[str, Any]:
        """Return the template variables, with their values, that turn thinking on (`reasoning`
        True) or off (False). Return an empty dictionary for None.
        """
        if reasoning is None:
            return {}
        return {
            name: THINKING_SWITCHES[name][0 if reasoning else 1] for name in self.thinking_variables
        }

    @property
    def thinking_variables(self) -> tuple[str, ...]:
        """Return the names of the variables of this template that turn thinking on or off. Empty
        for a template that cannot switch it.
        """
        return tuple(name for name in THINKING_SWITCHES if name in self.variables)

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """Return the names of the variables that the template reads, such as messages and tools.
        Empty when the template cannot be parsed.
        """
        import jinja2
        from jinja2 import meta

        try:
            return frozenset(
                meta.find_undeclared_variables(make_environment(self._budget).parse(self.source))
            )
        # render() reports the error
        except (jinja2.TemplateError, RecursionError):
            return frozenset()

    def accepts_system(self) -> bool:
        """Return whether a prompt contains the text of its system message. Some templates refuse
        system messages or leave them out. Return False for a template that is broken or exceeds its
        limits.
        """
        if self._accepts_system is None:
            conversation = track_conversation(PART_PROBES["system"], {})
            self._budget.start_prompt()
            try:
                self._accepts_system = self._writes(
                    conversation, "system", self._part_roles(conversation.messages)
                )
            except UserError:
                return False
        return self._accepts_system

    def _layouts(self, changes: tuple[str, ...]) -> Iterator[ConversationLayout]:
        """Yield the layouts to try for a conversation that `changes` can change. The first is the one
        that was successful for the last conversation of this kind.
        """
        remembered = self._remembered.get(changes)
        if remembered:
            yield remembered
        for layout in layouts_with(changes):
            if layout != remembered:
                yield layout

    def _render_checked(
        self,
        conversation: TrackedConversation,
        layout: ConversationLayout,
        add_generation_prompt: bool,
    ) -> TrackedText:
        """Return the prompt for a layout of a conversation. Raises TemplateFailure if it lacks a
        text.
        """
        part_roles = self._part_roles(conversation.messages)
        prompt = self._render_layout(conversation, layout, part_roles, add_generation_prompt)
        losses = conversation.find_losses(prompt)
        if losses:
            raise TemplateFailure(f"the chat template leaves out {losses[0].text}", losses)
        return prompt

    def _part_roles(self, messages: Sequence[Message]) -> frozenset[str]:
        """Return the roles of these messages whose content the template expects as a list of
        parts. A role is tried once.
        """
        for role in ("user", *(message.role for message in messages)):
            if role in PART_PROBES and role not in self._expects_parts:
                self._expects_parts[role] = self._needs_parts(role)
        return self._known_part_roles()

    def _known_part_roles(self) -> frozenset[str]:
        # copied first, because another thread may add a role
        known = self._expects_parts.copy()
        return frozenset(role for role, needs_parts in known.items() if needs_parts)

    def _needs_parts(self, role: str) -> bool:
        """Return whether the template writes the content of a message with this role only if it is
        a list of parts.
        """
        known = self._known_part_roles()
        conversation = track_conversation(PART_PROBES[role], {})
        return not self._writes(conversation, role, known) and self._writes(
            conversation, role, known | {role}
        )

    def _writes(
        self, conversation: TrackedConversation, role: str, part_roles: frozenset[str]
    ) -> bool:
        """Return whether a layout of a conversation exists in whose prompt the template writes the
        contents of all messages of this role, as such. Raises UserError if the template is broken
        or exceeds its limits, so that this says nothing about the role.
        """
        changes = possible_changes(conversation.messages, has_tools=False)
        for layout in layouts_with([change for change in changes if change != "folds_system"]):
            try:
                prompt = self._render_layout(conversation, layout, part_roles, True)
            except TemplateFailure:
                continue
            if not any(
                source.kind == "content" and conversation.messages[source.message].role == role
                for source in conversation.find_losses(prompt)
            ):
                return True
        return False

    def _render_layout(
        self,
        conversation: TrackedConversation,
        layout: ConversationLayout,
        part_roles: frozenset[str],
        add_generation_prompt: bool,
    ) -> TrackedText:
        """Return the prompt for a layout of a conversation. Raises TemplateFailure if the template
        refuses it or fails, and UserError if it is broken or exceeds its limits.
        """
        import jinja2

        messages = apply_layout(conversation.messages, layout)
        variables = conversation.variables
        n_characters = sum(len(message.content) for message in messages) + len(str(variables))
        self._budget.start_rendering(n_characters)
        now = datetime.now().astimezone()
        dates = {
            name: now.strftime(date_format)
            for name, date_format in DATE_FORMATS.items()
            if name in self.variables
        }
        values = {
            "tools": ClientList() if layout.lists_tools else None,
            **({"functions": ""} if "functions" in self.variables else {}),
            **dates,
            **self.thinking_values(self.reasoning),
            **variables,
            "messages": template_values(messages, layout, part_roles),
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self.bos,
            "eos_token": self.eos,
        }
        try:
            pieces: list[str] = []
            length = 0
            for piece in self._template().generate(values):
                length += len(piece)
                if length > MAX_CHARACTERS + n_characters:
                    raise TemplateBudgetExceeded("its output is too long")
                pieces.append(piece)
            return track(join_texts(pieces))
        except TemplateError as error:
            raise TemplateFailure(f"the chat template refuses this conversation: {error}") from None
        except TemplateBudgetExceeded as error:
            raise UserError(
                f"the chat template asks for too much: {error}", hint=TEMPLATE_HINT
            ) from None
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            AttributeError,
            ArithmeticError,
            LookupError,
            NameError,
            RuntimeError,
            MemoryError,
            AssertionError,
        ) as error:
            # These errors come from code of the template, so the template is at fault, not llmcli.
            raise TemplateFailure(
                f"the chat template fails: {type(error).__name__}: {error}"
            ) from None

    def _template(self) -> "jinja2.Template":
        """Return the compiled template. Raises UserError if it is broken. A template is compiled
        once, because a large one takes seconds.
        """
        import jinja2

        if self._compiled is None and not self._defect:
            try:
                self._compiled = make_environment(self._budget).from_string(self.source)
            except jinja2.TemplateSyntaxError as error:
                self._defect = f"line {error.lineno}: {error.message}"
            # the template is nested too deeply for Python or Jinja
            except (SyntaxError, RecursionError, MemoryError) as error:
                self._defect = f"{type(error).__name__}: {error}"
        if self._compiled is None:
            raise UserError(f"the chat template is broken: {self._defect}", hint=TEMPLATE_HINT)
        return self._compiled
