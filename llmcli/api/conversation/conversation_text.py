"""Renders a conversation with functions as a prompt text.

The chat template is given the functions, calls and results as such. If it leaves some of them out,
or refuses the conversation, they are written as plain text.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmcli.api.conversation.function_text import has_calls, spell_out_calls, spell_out_functions
from llmcli.api.conversation.tools import NO_TOOLS, ToolSet
from llmcli.api.tool_calls import find_format
from llmcli.api.tool_calls.base import ToolCallFormat
from llmcli.runtime.text.chat_template import ChatTemplate, TemplateFailure
from llmcli.runtime.text.conversation_layout import PARAGRAPH
from llmcli.runtime.text.conversation_sources import TOOL_VARIABLES, track_conversation
from llmcli.runtime.text.template_budget import RenderingClock
from llmcli.runtime.text.tracked_text import TrackedText, from_outside, join_texts
from llmcli.runtime.text.value_text import json_layout
from llmcli.types import Message

SEARCHED_CHARACTERS = 8  # of the beginning of a prompt, which are looked for after a BOS token
DOCUMENTS = "documents"  # variable and field with texts that the answer is to be based on


@dataclass(frozen=True, slots=True)
class ConversationText:
    """The prompt text of a conversation. `call_format`: the format in which the model has been
    asked to write tool calls; None without tools. `messages`: as they were rendered.
    """

    text: TrackedText
    call_format: ToolCallFormat | None
    messages: Sequence[Message] = ()

    def locate(self, beginning: str) -> str:
        """Return where the text after `beginning` is, such as "message 2 (user)" or "before message
        2 (user)". `beginning`: the beginning of the prompt's text, with what the tokenizer adds to
        it. Return "" if it is not, or if no message follows.
        """
        plain = self.text.plain
        # a BOS token, and a space that the tokenizer has put before the text
        start = max(0, beginning.find(plain[:SEARCHED_CHARACTERS]))
        position = len(beginning) - start
        if not plain.startswith(beginning[start:]):
            return ""
        sources = track_conversation(self.messages, {}).sources
        for span_start, end, source in self.text.spans:
            name = sources[source].text if 0 <= source < len(sources) else ""
            if position < end and name:
                return name if span_start <= position else f"before {name}"
        return ""


@dataclass(frozen=True, slots=True)
class _Rendering:
    """A way to render a conversation: the template, the messages and the template variables."""

    template: ChatTemplate
    messages: Sequence[Message]
    variables: Mapping[str, Any] = field(default_factory=dict)
    call_format: ToolCallFormat | None = None


def render_conversation(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: ToolSet = NO_TOOLS,
    variables: Mapping[str, Any] | None = None,
    *,
    add_generation_prompt: bool = True,
    continues_last: bool = False,
) -> ConversationText:
    """Return the prompt text of a conversation. `variables`: further template variables.
    `continues_last`: the text ends after the last message.

    Raises UserError if the template refuses the conversation, or leaves out a message, in every way
    to write it.
    """
    failure, clock = None, RenderingClock()
    for rendering in _renderings(template, messages, tools, variables or {}):
        try:
            text = rendering.template.render(
                merge_system_texts(rendering.messages),
                rendering.variables,
                add_generation_prompt=add_generation_prompt,
                continues_last=continues_last,
                clock=clock,
            )
        except TemplateFailure as error:
            failure = failure or error
        else:
            messages = merge_system_texts(rendering.messages)
            return ConversationText(text, rendering.call_format, messages)
    raise failure or TemplateFailure("the chat template shows no documents")


def _renderings(
    main: ChatTemplate,
    messages: Sequence[Message],
    tools: ToolSet,
    variables: Mapping[str, Any],
) -> Iterator[_Rendering]:
    """Yield the ways to render a conversation: first as such, then with calls as text in the format
    that the model writes, then also with their results as text, and last with everything as text.
    """
    is_calling, has_tools = has_calls(messages), bool(tools.tools)
    has_documents = bool(variables.get(DOCUMENTS))
    templates = [main.select(has_tools=has_tools, has_documents=has_documents)]
    templates += [main.select(has_tools=True)] if is_calling else []
    for template in dict.fromkeys(templates):
        shows_functions = not template.variables.isdisjoint(TOOL_VARIABLES)
        if (has_tools and not shows_functions) or not _shows_documents(template, variables):
            continue
        family = find_format(template.source)
        shared = {**variables, **_tool_variables(template, tools)}
        call_format = family if has_tools else None
        yield _Rendering(template, messages, shared, call_format)
        for with_results in (False, True) if is_calling and shows_functions else ():
            spelled = spell_out_calls(messages, family, with_results)
            yield _Rendering(template, spelled, shared, call_format)
    if (is_calling or has_tools) and _shows_documents(main, variables):
        hermes = find_format("")
        spelled = spell_out_functions(spell_out_calls(messages, hermes, with_results=True), tools)
        yield _Rendering(main, spelled, variables, hermes if has_tools else None)


def _shows_documents(template: ChatTemplate, variables: Mapping[str, Any]) -> bool:
    """Return whether a template reads the documents, or there are none."""
    return not variables.get(DOCUMENTS) or DOCUMENTS in template.variables


def _tool_variables(template: ChatTemplate, tools: ToolSet) -> dict[str, Any]:
    """Return the variables in which a template expects the functions."""
    if not tools.tools:
        return {}
    definitions = [tool.definition for tool in tools.tools]
    values = dict.fromkeys(template.variables & TOOL_VARIABLES, definitions)
    if "functions" in values:  # Firefunction joins it with other texts
        return {**values, "functions": json_layout(False, 2, None, False).dump(definitions)}
    return values


def merge_system_texts(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with all system texts joined in one message at the beginning, because
    most templates accept a system message only there.
    """
    others = [message for message in messages if message.role != "system"]
    texts = [
        from_outside(message.content)
        for message in messages
        if message.role == "system" and message.content
    ]
    return [Message("system", join_texts(texts, PARAGRAPH)), *others] if texts else others
