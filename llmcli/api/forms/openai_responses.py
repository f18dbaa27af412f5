"""`/v1/responses`: OpenAI's newer API. This server stores nothing between two requests, so each
request must contain the whole conversation.
"""

import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal

from pydantic import model_validator

from llmcli.api import request_settings
from llmcli.api.bodies.base import (
    MaxEntries,
    RequestBody,
    WholeNumber,
    honored,
    ignored,
    missing,
    refused,
)
from llmcli.api.bodies.generation_fields import GenerationBody, OpenAiFields, Texts, TokenLimit
from llmcli.api.conversation.conversation_length import render_within_context
from llmcli.api.conversation.messages import MAX_MESSAGES
from llmcli.api.conversation.prompt import PromptRequest, RenderedPrompt, render_prompt
from llmcli.api.conversation.template_fields import (
    ReasoningFields,
    TemplateFields,
    read_template_variables,
    read_thinking_budget,
)
from llmcli.api.conversation.tool_call_stream import OutputPiece
from llmcli.api.conversation.tool_fields import (
    MAX_TOOLS,
    JsonSchema,
    ToolFields,
    ToolName,
    define_custom_tool,
    define_function,
    define_tools,
    left_out,
    read_tools,
)
from llmcli.api.conversation.tools import ToolDefinition
from llmcli.api.errors import ApiError
from llmcli.api.forms import logprobs
from llmcli.api.forms.answer_constraint import (
    ResponseFormat,
    read_answer_schema,
    read_constraint,
)
from llmcli.api.forms.base import (
    ApiForm,
    Document,
    disk_counts,
    encode_named_events,
    finish_reason,
    token_usage,
)
from llmcli.api.forms.logprobs import MAX_ALTERNATIVES
from llmcli.api.forms.responses_input import Input, read_conversation
from llmcli.api.forms.responses_output import ResponseOutput
from llmcli.api.server_settings import ServerSettings
from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.constraint.tool_calls import AnswerSchema
from llmcli.runtime.requests.request import Answer, Request
from llmcli.runtime.runner import Runner
from llmcli.types import Event, TokenTime

READ_TOOLS = (None, "function", "custom", "namespace")  # types of tools that are not left out
LOGPROBS_INCLUDE = "message.output_text.logprobs"
STATELESS = "this server stores nothing between two requests: send the whole conversation as input"


class ResponsesTool(RequestBody):
    """A tool. One that only OpenAI's server runs is left out."""

    origin: ClassVar[str] = "OpenAI"
    reports_unknown: ClassVar[bool] = False
    type: str | None = honored("function, custom, or namespace with tools of these types")
    name: ToolName | None = honored("1 to 128 letters, digits, _, - or .")
    description: str | None = honored("given to the model")
    parameters: JsonSchema | None = honored("the JSON schema of the arguments")
    strict: bool | None = honored("the arguments follow the schema in every call")
    format: Any = honored("of a custom tool: given to the model, and not enforced")
    tools: list[Any] | None = honored("the tools of a namespace")

    @model_validator(mode="before")
    @classmethod
    def _drop_unread_fields(cls, values: Any) -> Any:
        """Return only the type of a tool that is left out: its fields may have any form."""
        if isinstance(values, dict) and values.get("type", "function") not in READ_TOOLS:
            return {"type": values["type"]}
        return values

    @model_validator(mode="after")
    def _check(self) -> "ResponsesTool":
        if self.name is None and self.type in READ_TOOLS:
            raise missing("name")
        return self

    def definitions(
        self, path: str, notes: list[str], namespace: str = ""
    ) -> Iterator[ToolDefinition]:
        """Yield the definitions of the tool, or append a note if it is left out. `path`: the tool's
        path in the request. `namespace`: the name of its namespace, or "".
        """
        if self.type in (None, "function"):
            yield define_function(
                self.name or "", self.description, self.parameters, bool(self.strict), namespace
            )
        elif self.type == "custom":
            yield define_custom_tool(self.name or "", self.description, self.format)
        elif self.type == "namespace" and not namespace:
            for index, inner in enumerate(self.tools or ()):
                yield from inner.definitions(f"{path}.tools[{index}]", notes, self.name or "")
        else:
            notes.append(left_out(path, self.type))


class NamespacedTools(ResponsesTool):
    """A tool, or a namespace with tools."""

    tools: list[ResponsesTool] | None = honored("the tools of a namespace")


class TextOptions(RequestBody):
    """The form of the text of an answer."""

    origin: ClassVar[str] = "OpenAI"
    format: ResponseFormat | None = honored("text, or JSON of a schema")
    verbosity: Any = refused("ask for it in the instructions", "medium")


class ContextCompaction(RequestBody):
    """When a conversation is summarized."""

    origin: ClassVar[str] = "OpenAI"
    type: str | None = honored("compaction")
    compact_threshold: Annotated[int, WholeNumber(0, 2**53)] | None = honored(
        "the number of tokens from which the conversation is summarized"
    )


class ResponsesBody(ReasoningFields, ToolFields, TemplateFields, OpenAiFields, GenerationBody):
    """A request for a response."""

    origin: ClassVar[str] = "OpenAI"
    input: Annotated[Input, MaxEntries(MAX_MESSAGES)] = honored("the conversation", ...)
    instructions: str | None = honored("the system text")
    max_output_tokens: TokenLimit | None = honored("the largest number of tokens; -1: no limit")
    tools: Annotated[list[NamespacedTools], MaxEntries(MAX_TOOLS)] | None = honored(
        "functions and custom tools that the model may call; others are left out"
    )
    text: TextOptions | None = honored("the form of the answer")
    include: list[str] | None = honored(f"{LOGPROBS_INCLUDE} returns log-probabilities")
    top_logprobs: Annotated[int, WholeNumber(0, MAX_ALTERNATIVES)] | None = honored(
        "with these: return this many alternatives of each token"
    )
    truncation: Literal["auto", "disabled"] | None = honored(
        "auto leaves out the first messages of a conversation that is too long"
    )
    context_management: list[ContextCompaction] | None = honored(
        "accepted if the conversation is shorter than its threshold, refused otherwise"
    )
    stop: Texts | None = honored("texts that end the answer")
    metadata: Any = honored("returned with the answer")
    stream_options: Any = ignored("the last event of a stream always has the token counts")
    access_programs: Any = ignored("there are no programs")
    image: Any = ignored("no images are generated")
    background_options: Any = ignored("it belongs to background, which is refused")
    previous_response_id: Any = refused(STATELESS)
    previous_response: Any = refused(STATELESS)
    previous_input_messages: Any = refused(STATELESS)
    conversation: Any = refused(STATELESS)
    background: Any = refused(STATELESS)
    prompt: Any = refused("send the prompt itself")
    enable_response_messages: Any = refused("/apply-template returns the prompt")
    max_tokens: Any = refused("use max_output_tokens")
    max_completion_tokens: Any = refused("use max_output_tokens")
    messages: Any = refused("use input")
    response_format: Any = refused("use text.format")


class ResponsesForm(ApiForm):
    """OpenAI's Responses API. The response contains a list of output items: reasoning, a message,
    function calls.
    """

    path: ClassVar[str] = "/v1/responses"
    id_prefix: ClassVar[str] = "resp_"
    end_marker: ClassVar[bytes] = b""
    body_type: ClassVar[type[RequestBody]] = ResponsesBody
    body: ResponsesBody

    def __init__(
        self, document: Mapping[str, Any], runner: Runner, settings: ServerSettings
    ) -> None:
        super().__init__(document, runner, settings)
        body = self.body
        definitions = define_tools(body.tools, self.notes)
        self.tools = read_tools(definitions, body.tool_choice, body.parallel_tool_calls)
        self.prompt = self._render_prompt()
        self._check_compaction(len(self.prompt.tokens))
        self.constraint = self.prompt.constraint
        self.limit = request_settings.first_limit(body.max_output_tokens)
        options = request_settings.read_common_fields(body, runner, settings, body.stop, self.limit)
        self.has_logprobs = LOGPROBS_INCLUDE in (body.include or ())
        self._style = logprobs.LogprobStyle.of(body)
        tokens = self.prompt.tokens
        max_tokens = request_settings.answer_budget(
            runner, settings, len(tokens), request_settings.effective_limit(self.limit, settings)
        )
        self.requests = (
            Request(
                tokens,
                max_tokens=max_tokens,
                thinking=runner.thinking_limit(
                    self.prompt.opened_tags,
                    read_thinking_budget(body, runner.template, settings.reasoning_budget),
                ),
                **self.prompt.request_fields,
                **request_settings.context_fields(body, runner, settings, len(tokens)),
                **request_settings.with_logprobs(
                    options, runner, body, self.has_logprobs, body.top_logprobs or 0
                ),
            ),
        )
        self.check_requests()
        self._n_ids = 0
        # log-probabilities of tokens whose text was not sent yet
        self._pending_logprobs: list[Document] = []
        self._output, self._splitter, self._sequence_number = (
            ResponseOutput(self._make_digits, self.tools),
            self.prompt.new_splitter(self._make_digits),
            0,
        )

    def _make_digits(self) -> str:
        """Return 32 hexadecimal digits for the next item or call id. They are derived from the
        response's id and a counter, so that a process that resumes the stream makes the same ids.
        """
        self._n_ids += 1
        return uuid.uuid5(uuid.UUID(self.id.removeprefix(self.id_prefix)), str(self._n_ids)).hex

    def _render_prompt(self) -> RenderedPrompt:
        """Return the prompt of the conversation, without its first messages if it is too long and
        the request allows that.
        """
        body = self.body
        text_format = body.text.format if body.text else None
        schema = read_answer_schema(text_format, "text.format", is_nested=False)
        form = read_constraint(body, schema, "text.format")
        request = PromptRequest(
            read_conversation(body.instructions, body.input, self.notes),
            self.tools,
            form if isinstance(form, AnswerSchema) else None,
            form if isinstance(form, Constraint) else None,
            variables=read_template_variables(body, self.runner.template, self.notes),
            truncation=request_settings.read_truncation(body),
        )
        if body.truncation == "auto":
            return render_within_context(request, self.runner, self.settings, self.notes)
        return render_prompt(request, self.runner, self.settings)

    def _check_compaction(self, n_tokens: int) -> None:
        """Raise ApiError if the conversation would have to be summarized. `n_tokens`: of the
        prompt.
        """
        for index, entry in enumerate(self.body.context_management or ()):
            if entry.compact_threshold is not None and n_tokens > entry.compact_threshold:
                path = f"context_management[{index}]"
                raise ApiError(
                    f"{path}: this server never summarizes a conversation, which has {n_tokens}"
                    " tokens",
                    param=path,
                )

    def document(self, answers: Sequence[Answer]) -> Document:
        """Return the response with its output items."""
        (answer,) = answers
        top = answer.top_logprobs or ((),) * len(answer.tokens)
        n_characters = 0
        for token, ranked in zip(answer.tokens, top, strict=True) if self.has_logprobs else ():
            deque(self._token_events(token.text, token, ranked), maxlen=0)
            n_characters += len(token.text)
        deque(
            chain(self._token_events(answer.text[n_characters:]), self._closing_events(answer)),
            maxlen=0,
        )
        return self._response(self._output, answer)

    def stream_start(self) -> Iterable[Document]:
        """Return the events `response.created` and `response.in_progress`."""
        self.has_started = True
        return self._numbered(
            {"type": f"response.{name}", "response": self._response(self._output, None)}
            for name in ("created", "in_progress")
        )

    def progress_chunk(self, number: int) -> Document:
        """Return an event `response.in_progress`, for the progress of a prompt."""
        response = self._response(self._output, None)
        (chunk,) = self._numbered([{"type": "response.in_progress", "response": response}])
        return chunk

    def stream_event(self, event: Event) -> Iterable[Document]:
        """Return the API's stream events for the text that an engine event adds."""
        return self._numbered(self._token_events(event.text, event.token, event.top_logprobs))

    def _token_events(
        self, text: str, token: TokenTime | None = None, top: Sequence[tuple[int, float]] = ()
    ) -> Iterator[Document]:
        """Yield the stream events for a text and the token that it belongs to, if any. `top`: the
        likeliest tokens at the token's position. A token's log-probability is sent with its text.
        Tokens of thinking and of tool calls get no log-probability.
        """
        if self.has_logprobs and token:
            self._pending_logprobs.append(
                logprobs.token_logprobs(self.runner, token, top, self._style)
            )
        yield from self._item_events(self._splitter.feed(text))

    def _closing_events(self, answer: Answer) -> Iterator[Document]:
        """Yield the stream events for the remaining text, then those that close the open item."""
        yield from self._item_events(self._splitter.finish())
        yield from self._output.close(_status(answer))

    def _item_events(self, pieces: Sequence[OutputPiece]) -> Iterator[Document]:
        """Yield the stream events for pieces of the answer. The pending log-probabilities are sent
        with content and dropped with other pieces.
        """
        for piece in pieces:
            yield from self._output.add(
                piece, self._pending_logprobs if piece.kind == "content" else None
            )
            self._pending_logprobs = []

    def stream_end(self, answers: Sequence[Answer]) -> Iterable[Document]:
        """Yield the remaining events, then an event with the whole response."""
        (answer,) = answers
        yield from self._numbered(self._closing_events(answer))
        event = {
            "type": f"response.{_status(answer)}",
            "response": self._response(self._output, answer),
        }
        yield from self._numbered([event])

    def encode_chunks(self, chunks: Iterable[Document]) -> bytes:
        """Encode chunks as Server-Sent Events with an `event:` line."""
        return encode_named_events(chunks)

    def _numbered(self, events: Iterable[Document]) -> Iterator[Document]:
        """Yield the events with consecutive sequence numbers."""
        for event in events:
            yield {**event, "sequence_number": self._sequence_number}
            self._sequence_number += 1

    def _response(self, output: ResponseOutput, answer: Answer | None) -> Document:
        """Return the response object. `answer`: the finished answer, or None while the response is
        in progress.
        """
        body, request = self.body, self.requests[0]
        status = "in_progress" if answer is None else _status(answer)
        choice: Any = self.tools.choice
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "completed_at": int(time.time()) if status == "completed" else None,
            "instructions": body.instructions,
            "max_output_tokens": self.limit,
            "model": self.model,
            "output": list(output.items),
            "parallel_tool_calls": self.tools.allows_parallel,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": request.sampling["temp"],
            "top_p": request.sampling["top_p"],
            "text": self.source.get("text") or {"format": {"type": "text"}},
            "tool_choice": {"type": "function", "name": choice}
            if self.tools.names_function
            else choice,
            "tools": [{"strict": False, **tool} for tool in self.source.get("tools") or ()],
            "truncation": body.truncation or "disabled",
            "usage": None if answer is None else self._usage(answer),
            "metadata": body.metadata or {},
        }

    def _usage(self, answer: Answer) -> Document:
        counts = token_usage([answer])
        return {
            "input_tokens": counts["prompt_tokens"],
            "output_tokens": counts["completion_tokens"],
            "total_tokens": counts["total_tokens"],
            "input_tokens_details": {
                "cached_tokens": answer.cached_tokens,
                **disk_counts([answer]),
                "cache_write_tokens": 0,
            },
            "output_tokens_details": {"reasoning_tokens": self.prompt.count_thinking(answer)},
        }


def _status(answer: Answer) -> str:
    return "completed" if finish_reason(answer) == "stop" else "incomplete"


FORMS = (ResponsesForm,)
