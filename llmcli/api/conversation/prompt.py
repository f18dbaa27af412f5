"""Renders a conversation as a prompt, and selects the constraint and the tool call format for its
answer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmcli.api import request_settings
from llmcli.api.conversation.conversation_text import ConversationText, render_conversation
from llmcli.api.conversation.output_splitter import OutputSplitter
from llmcli.api.conversation.tools import NO_TOOLS, ToolSet
from llmcli.api.errors import ApiError
from llmcli.api.server_settings import ServerSettings
from llmcli.api.tool_calls.base import MakeDigits, ToolCallFormat, random_digits
from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.constraint.tool_calls import AnswerSchema
from llmcli.runtime.requests.request import Answer
from llmcli.runtime.runner import Runner
from llmcli.runtime.text.chat_template import ChatTemplate
from llmcli.runtime.text.reasoning import ThinkingTags
from llmcli.types import Message


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """The content of a chat request, independent of the API's field names.

    - `schema`: the JSON schema that the answer must follow, or None.
    - `constraint`: a grammar or schema in llama-server's fields `grammar` and `json_schema`, or
      None.
    - `variables`: template variables that the request sets.
    - `add_generation_prompt`: whether the template begins the assistant's message at the end of the
      prompt.
    - `continues_last`: whether the answer continues the text of the last message.
    - `splits_thinking`, `splits_calls`: whether thinking and tool calls are separated from the text
      of the answer.
    - `truncation`: how a prompt is shortened that is too long; None: it is refused.
    """

    messages: Sequence[Message]
    tools: ToolSet = NO_TOOLS
    schema: AnswerSchema | None = None
    constraint: Constraint | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continues_last: bool = False
    splits_thinking: bool = True
    splits_calls: bool = True
    truncation: request_settings.Truncation | None = None


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """The token ids of a prompt, and what is needed to constrain and split its answer.

    `constraint`: the constraint of the answer, or None. `opened_tags`: the thinking tags whose
    opening tag ends the prompt, or None. `call_format`: the format of tool calls; None without
    tools. `splits_thinking`, `splits_calls`: whether thinking and tool calls are separated from the
    text of the answer. `locate`: see ConversationText.locate().
    """

    tokens: tuple[int, ...]
    constraint: Constraint | None
    opened_tags: ThinkingTags | None
    call_format: ToolCallFormat | None
    tools: ToolSet
    splits_thinking: bool = True
    splits_calls: bool = True
    locate: Callable[[str], str] = lambda beginning: ""

    def new_splitter(self, make_digits: MakeDigits = random_digits) -> OutputSplitter:
        """Return a splitter for one answer to this prompt. `make_digits`: returns the hexadecimal
        digits of a new tool call id.
        """
        call_format = self.call_format
        if call_format and self.tools.is_strict:
            call_format = call_format.tags_only or call_format
        return OutputSplitter(
            self.opened_tags,
            call_format if self.splits_calls else None,
            self.tools.names,
            self.tools.string_arguments,
            make_digits,
            self.splits_thinking,
        )

    @property
    def request_fields(self) -> dict[str, Any]:
        """Keyword arguments for Request: where a text of the prompt is, the text after which the
        grammar starts, and the marks that begin a tool call, anywhere or at the beginning of the
        reply.
        """
        fields = {
            "locate": self.locate,
            "grammar_after": self.opened_tags.closing if self.opened_tags else "",
        }
        call_format = self.call_format
        if call_format is None:
            return fields
        name = "structure_starts" if call_format.starts_answer else "structure_marks"
        return {**fields, name: call_format.openings}

    def count_thinking(self, answer: Answer) -> int:
        """Return the number of thinking tokens of an answer. Those of a beam search are counted
        here, with their tags, because nothing follows its thinking.
        """
        if not answer.beams:
            return answer.n_thinking
        splitter, thinking = self.new_splitter(), 0
        for number, token in enumerate(answer.tokens):
            kinds = {piece.kind for piece in splitter.feed(token.text)}
            if "thinking" in kinds:
                thinking = number + 1
            if kinds - {"thinking"}:
                break
        return thinking


def base_model_error() -> ApiError:
    """Return the error for a conversation that is sent to a model without a chat template."""
    return ApiError(
        "this is a base model without a chat template: use /v1/completions to continue a text"
    )


def render_prompt(
    request: PromptRequest, runner: Runner, settings: ServerSettings
) -> RenderedPrompt:
    """Render a conversation with the model's chat template. Raises ApiError if the model has no
    template, and UserError if the template fails for this conversation.
    """
    if runner.template is None:
        raise base_model_error()
    conversation = render_text(request, runner.template, settings)
    tokens = request_settings.encode_prompt(runner, settings, conversation.text, request.truncation)
    opened_tags = None if request.continues_last else runner.opened_tags(tokens)
    call_format = conversation.call_format
    return RenderedPrompt(
        tokens,
        _constraint(request, call_format),
        opened_tags,
        call_format,
        request.tools,
        request.splits_thinking,
        request.splits_calls,
        conversation.locate,
    )


def render_text(
    request: PromptRequest, template: ChatTemplate, settings: ServerSettings
) -> ConversationText:
    """Return the prompt text of a conversation, and the format of tool calls. Raises ApiError if
    the last message cannot be continued, and UserError if the template fails for this conversation.
    """
    messages = list(request.messages)
    if settings.system and not any(message.role == "system" for message in messages):
        messages = [Message("system", settings.system), *messages]
    if request.continues_last and (
        not messages or messages[-1].role != "assistant" or not messages[-1].content.strip()
    ):
        raise ApiError(
            "continue_final_message needs an assistant's message at the end",
            param="continue_final_message",
        )
    return render_conversation(
        template,
        messages,
        request.tools,
        request.variables,
        add_generation_prompt=request.add_generation_prompt and not request.continues_last,
        continues_last=request.continues_last,
    )


def _constraint(request: PromptRequest, call_format: ToolCallFormat | None) -> Constraint | None:
    """Return the constraint of the answer, or None. Forced tool calls come first, then the JSON
    schema, then the calls of strict functions, which are constrained only if there is no other
    constraint. With tools, a schema still allows a call instead of the JSON document.
    """
    if call_format and request.tools.is_forced:
        return request.tools.constraint(call_format)
    if request.schema is None:
        if call_format and request.tools.is_strict and request.constraint is None:
            return request.tools.interleaved_constraint(call_format)
        return request.constraint
    if call_format:
        return request.tools.constraint(call_format, request.schema)
    return request.schema.constraint
