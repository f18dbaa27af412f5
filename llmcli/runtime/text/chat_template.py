"""Render conversations to prompts with the model's own chat template (Jinja). The template is
untrusted input, so it runs in a sandbox with limits (jinja_sandbox.py).
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmcli.errors import UserError
from llmcli.runtime.text.jinja_sandbox import (
    MAX_CHARACTERS,
    TemplateBudget,
    TemplateBudgetExceeded,
    TemplateError,
    make_environment,
)
from llmcli.types import Message

if TYPE_CHECKING:
    import jinja2

# Template variables that turn thinking on or off. "enable_thinking" is the name in Qwen3 and most
# other templates, "thinking" the name in DeepSeek and Granite.
THINKING_VARIABLES = ("enable_thinking", "thinking")
TEMPLATE_HINT = "use --raw for no template, or --chat-template FILE for another one"


class ChatTemplate:
    """A model's chat template, compiled when it is first rendered."""

    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        """`source`: the Jinja text. `bos`, `eos`: the texts of the tokens that start and end a
        sequence, which the template may write.
        """
        self.source, self.bos, self.eos = source, bos, eos
        # whether the template tells the model to think; None leaves it to the template
        self.reasoning: bool | None = None
        self._compiled: jinja2.Template | None = None
        self._accepts_system: bool | None = None  # None until it is known
        self._budget = TemplateBudget()

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Return the prompt text for `messages`. `add_generation_prompt`: end the prompt with the
        start of an assistant's message. `variables`: values of further template variables, such as
        `tools`.

        Raises UserError when the template fails, exceeds its limits or refuses the messages.
        """
        import jinja2

        n_characters = sum(len(message.content) for message in messages) + len(str(variables))
        self._budget.start_rendering(n_characters)
        try:
            pieces: list[str] = []
            length = 0
            for piece in self._template().generate(
                messages=[
                    {"role": message.role, "content": message.content, **message.template_fields}
                    for message in messages
                ],
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos,
                eos_token=self.eos,
                **{"tools": None, **self.thinking_values(self.reasoning), **variables},
            ):
                length += len(piece)
                if length > MAX_CHARACTERS + n_characters:
                    raise TemplateBudgetExceeded("its output is too long")
                pieces.append(piece)
            return "".join(pieces)
        except TemplateError as error:
            raise UserError(
                f"the chat template refuses this conversation: {error}", hint=TEMPLATE_HINT
            ) from None
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"the chat template is broken: line {error.lineno}: {error.message}",
                hint=TEMPLATE_HINT,
            ) from None
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
            RuntimeError,
            MemoryError,
            AssertionError,
            SyntaxError,
        ) as error:
            # These errors come from code of the template, so the template is at fault, not llmcli.
            raise UserError(
                f"the chat template fails: {type(error).__name__}: {error}", hint=TEMPLATE_HINT
            ) from None

    def check(self) -> None:
        """Raise UserError when the template cannot be compiled. Nothing is rendered."""
        import jinja2

        try:
            self._template()
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"the chat template is broken: line {error.lineno}: {error.message}",
                hint=TEMPLATE_HINT,
            ) from None
        # the template is nested too deeply for Python or Jinja
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise UserError(
                f"the chat template is broken: {type(error).__name__}: {error}", hint=TEMPLATE_HINT
            ) from None

    def thinking_values(self, reasoning: bool | None) -> dict[str, bool]:
        """Return the template variables, with their values, that turn thinking on (`reasoning`
        True) or off (False). Return an empty dictionary for None.
        """
        return {} if reasoning is None else dict.fromkeys(self.thinking_variables, reasoning)

    @property
    def thinking_variables(self) -> tuple[str, ...]:
        """Return the names of the variables of this template that turn thinking on or off. Empty
        for a template that cannot switch it.
        """
        return tuple(name for name in THINKING_VARIABLES if name in self.variables)

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
        system messages or leave them out.
        """
        if self._accepts_system is None:
            self._accepts_system = self._renders_system()
        return self._accepts_system

    def _renders_system(self) -> bool:
        """Render a conversation with a system message, and return whether its text is in the
        prompt.
        """
        probe = "system-probe-5b1f"
        try:
            return probe in self.render([Message("system", probe), Message("user", "hello")])
        except UserError:
            return False

    def _template(self) -> "jinja2.Template":
        if self._compiled is None:
            self._compiled = make_environment(self._budget).from_string(self.source)
        return self._compiled
