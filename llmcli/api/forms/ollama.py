"""`/api/chat` and `/api/generate`: ollama's API, for clients that support no other API. A request
is translated to one for OpenAI's chat completions.

Responses are lines of JSON; they are streamed unless the request sets `stream` to false. Durations
are in nanoseconds. A prompt that does not fit into the context is refused unless the request sets
`truncate`, because ollama's default loses the beginning of a conversation without a word.
"""

import itertools
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar

from pydantic import model_validator

from llmcli.api import request_settings
from llmcli.api.bodies.base import (
    Either,
    MaxEntries,
    RequestBody,
    WholeNumber,
    honored,
    ignored,
    noted,
    problem,
    refused,
)
from llmcli.api.bodies.checks import read_body
from llmcli.api.bodies.generation_fields import (
    MAX_TOKENS,
    GenerationBody,
    Texts,
    TokenLimit,
    shared_values,
)
from llmcli.api.conversation import go_template
from llmcli.api.conversation.conversation_length import render_within_context
from llmcli.api.conversation.messages import MAX_MESSAGES, Content, join_parts
from llmcli.api.conversation.prompt import PromptRequest, RenderedPrompt
from llmcli.api.conversation.template_fields import SWITCH_WORDS, ReasoningEffort
from llmcli.api.conversation.tool_call_stream import OutputPiece
from llmcli.api.conversation.tool_fields import MAX_TOOLS, ChatTool
from llmcli.api.conversation.tools import NO_TOOLS, ToolDefinition
from llmcli.api.errors import ApiError, error_document
from llmcli.api.forms import infill, logprobs
from llmcli.api.forms.base import Document, disk_counts, encode_json, finish_reason
from llmcli.api.forms.conversation_form import ChatBody, ConversationForm
from llmcli.api.forms.logprobs import MAX_ALTERNATIVES
from llmcli.api.forms.openai_completions import check_tokens
from llmcli.api.server_settings import ServerSettings
from llmcli.api.tool_calls.base import parse_arguments
from llmcli.runtime.requests.request import Answer
from llmcli.runtime.runner import Runner
from llmcli.types import Event

LATEST_TAG = ":latest"  # ollama's clients add it to a name
NO_IMAGES = "this server reads only text"
# finish reason for a request without a prompt, which clients send to load a model
LOAD_REASON = "load"
MAX_CONTEXT_TOKENS = 1 << 22  # token ids in `context`
LOADED = "the model is loaded when the server starts"


class OllamaOptions(GenerationBody):
    """Options of an answer."""

    origin: ClassVar[str] = "ollama"
    num_predict: Annotated[int, WholeNumber(-2, MAX_TOKENS)] | None = honored(
        "the largest number of tokens; -1 and -2: no limit"
    )
    stop: Texts | None = honored("texts that end the answer")
    num_keep: TokenLimit | None = honored("the same as n_keep")
    timings_per_token: Any = noted("the last object has the timings")
    return_progress: Any = noted("these streams have no progress of the prompt")
    model: Any = noted("set it beside options")
    stream: Any = noted("set it beside options")
    num_ctx: Any = ignored(LOADED)
    num_batch: Any = ignored(LOADED)
    num_gpu: Any = ignored(LOADED)
    main_gpu: Any = ignored(LOADED)
    num_thread: Any = ignored(LOADED)
    use_mmap: Any = ignored(LOADED)
    use_mlock: Any = ignored(LOADED)
    low_vram: Any = ignored(LOADED)
    f16_kv: Any = ignored(LOADED)
    numa: Any = ignored(LOADED)
    vocab_only: Any = ignored(LOADED)
    draft_num_predict: Any = ignored("the server chooses how much it drafts")
    penalize_newline: Any = ignored("ollama ignores it, too")
    tfs_z: Any = refused("use min_p", 1)


class OllamaFields(RequestBody):
    """The fields of all of ollama's generating endpoints."""

    origin: ClassVar[str] = "ollama"
    model: str | None = honored("any name")
    stream: bool | None = honored("send the answer while it is generated, which is the default")
    format: Annotated[str | dict[str, Any], Either("json or a JSON schema")] | None = honored(
        "json, or a JSON schema that the answer follows"
    )
    options: OllamaOptions | None = honored("options of the answer")
    think: Annotated[bool | ReasoningEffort, Either(SWITCH_WORDS)] | None = honored(
        "whether and how much the model thinks"
    )
    truncate: bool | None = honored(
        "true leaves out the first messages of a conversation that is too long; otherwise it is"
        " refused"
    )
    logprobs: bool | None = honored("return the log-probability of each token")
    top_logprobs: Annotated[int, WholeNumber(0, MAX_ALTERNATIVES)] | None = honored(
        "return this many alternatives of each token"
    )
    keep_alive: Any = ignored(
        "a server of one model keeps it; a server of several unloads the model after this time"
    )
    shift: bool | None = noted("the server decides whether a context that is full slides")
    debug_render_only: Any = refused(
        "/apply-template returns the prompt", alias="_debug_render_only"
    )

    @classmethod
    def advice_about(cls, name: str) -> str | None:
        """Return where a field belongs that clients put beside `options`."""
        return f"set options.{name}" if name in OllamaOptions.effects() else None

    @model_validator(mode="after")
    def _check_format(self) -> "OllamaFields":
        if isinstance(self.format, str) and self.format not in ("", "json"):
            raise problem(f"format must be json or a JSON schema, not {self.format[:40]!r}")
        return self


class OllamaFunction(RequestBody):
    """The function of an earlier tool call."""

    origin: ClassVar[str] = "ollama"
    reports_unknown: ClassVar[bool] = False
    name: str = honored("the function's name", ...)
    arguments: Any = honored("the arguments, an object")


class OllamaCall(RequestBody):
    """A tool call of an earlier answer."""

    origin: ClassVar[str] = "ollama"
    reports_unknown: ClassVar[bool] = False
    id: str | None = honored("the call's id; calls without one are counted")
    function: OllamaFunction = honored("the called function", ...)


class OllamaMessage(RequestBody):
    """A message of a conversation."""

    origin: ClassVar[str] = "ollama"
    reports_unknown: ClassVar[bool] = False
    role: str = honored("whose message it is", ...)
    content: Content | None = honored("the text")
    thinking: str | None = honored("the thinking of an earlier answer")
    tool_calls: list[OllamaCall] | None = honored("tool calls of an earlier answer")
    tool_name: str | None = honored("the function whose result this is")
    tool_call_id: str | None = honored("the call whose result this is; calls are counted otherwise")
    images: Any = refused(NO_IMAGES)


class OllamaChatBody(OllamaFields):
    """A request for a chat."""

    messages: Annotated[list[OllamaMessage], MaxEntries(MAX_MESSAGES)] | None = honored(
        "the conversation; without it the model only has to be loaded"
    )
    tools: Annotated[list[ChatTool], MaxEntries(MAX_TOOLS)] | None = honored(
        "functions that the model may call"
    )


class OllamaGenerateBody(OllamaFields):
    """A request to continue a text or to answer a question."""

    prompt: str | None = honored("the text; without it the model only has to be loaded")
    suffix: str | None = honored("the text after the gap that the answer fills")
    system: str | None = honored("the system text")
    template: str | None = honored("another template, in a part of Go's template language")
    context: Annotated[list[int], MaxEntries(MAX_CONTEXT_TOKENS)] | None = honored(
        "the context of an earlier answer, which precedes the prompt"
    )
    raw: bool | None = honored("continue the text as it is, without a template")
    images: Any = refused(NO_IMAGES)


class OllamaChatForm(ConversationForm):
    """ollama's chat endpoint. A request without messages, which clients send to load a model, has
    no `requests` for the engine.
    """

    path: ClassVar[str] = "/api/chat"
    id_prefix: ClassVar[str] = "ollama-"
    media_type: ClassVar[str] = "application/x-ndjson"
    end_marker: ClassVar[bytes] = b""
    # Clients parse every line as JSON, also an empty one. A space before an object is all they skip.
    ping: ClassVar[bytes] = b" "
    streams_by_default: ClassVar[bool] = True
    body_type: ClassVar[type[RequestBody]] = OllamaChatBody

    def __init__(
        self, document: Mapping[str, Any], runner: Runner, settings: ServerSettings
    ) -> None:
        self._started_ns = time.perf_counter_ns()
        self._n_calls = 0  # number of tool calls in the answer so far
        super().__init__(document, runner, settings)
        self._style = logprobs.LogprobStyle.of(self.chat)
        self.is_stream = self.body.stream is not False
        self.requested_name = find_listed_name(self.body.model, settings)
        if self._has_no_prompt():
            self.requests, self.constraint = (), None

    def _has_no_prompt(self) -> bool:
        return not self.body.messages

    def _messages(self) -> list[Document]:
        """Return the conversation as OpenAI's messages."""
        return translate_messages(self.body.messages or ())

    def chat_body(self) -> ChatBody:
        """Translate the request to one for /v1/chat/completions."""
        body: OllamaFields = self.body
        options = body.options or OllamaOptions()
        document = shared_values(self.source.get("options") or {}, OllamaOptions) | {
            "messages": self._messages() or [{"role": "user", "content": ""}],
            "n_keep": options.n_keep if options.num_keep is None else options.num_keep,
            "stop": options.stop,
            "max_tokens": None if (limit := options.num_predict) is None else max(-1, limit),
            "logprobs": body.logprobs,
            "top_logprobs": body.top_logprobs,
            "think": body.think,
            "response_format": _response_format(body.format),
        }
        return read_body(ChatBody, document, [], self.path)

    def _render_prompt(self, request: PromptRequest) -> RenderedPrompt:
        if self.body.truncate:
            return render_within_context(request, self.runner, self.settings, self.notes)
        return super()._render_prompt(request)

    def document(self, answers: Sequence[Answer]) -> Document:
        """Return the complete response as one object."""
        pieces: list[OutputPiece] = []
        for answer in answers:
            splitter = self.prompt.new_splitter()
            pieces = [*splitter.feed(answer.text), *splitter.finish()]
        return {**self._message_document(pieces), **self._end_document(answers)}

    def stream_start(self) -> Iterable[Document]:
        """Return no chunks: a stream of this API begins with the answer's first text."""
        self.has_started = True
        return []

    def stream_event(self, event: Event) -> Iterable[Document]:
        """Return an object with the text, the complete tool calls and the log-probability that an
        event adds; no object if it adds nothing.
        """
        pieces = self._splitters[0].feed(event.text)
        log_probabilities = (
            logprobs.event_logprobs(self.runner, event, self._style) if self.has_logprobs else None
        )
        has_output = any(piece.kind not in ("call_start", "arguments") for piece in pieces)
        if not has_output and not log_probabilities:
            return []
        return [
            {
                **self._message_document(pieces),
                "done": False,
                **({"logprobs": log_probabilities["content"]} if log_probabilities else {}),
            }
        ]

    def stream_end(self, answers: Sequence[Answer]) -> Iterable[Document]:
        """Yield the remaining text, then an object with the finish reason and the token counts."""
        if self.requests and (pieces := self._splitters[0].finish()):
            yield {**self._message_document(pieces), "done": False}
        yield {**self._message_document([]), **self._end_document(answers, is_complete=False)}

    def encode_chunks(self, chunks: Iterable[Document]) -> bytes:
        """Encode each object as a line of JSON."""
        return b"".join(encode_json(chunk) + b"\n" for chunk in chunks)

    @classmethod
    def encode_error(cls, error: ApiError) -> bytes:
        """Encode an error as a line of JSON."""
        return encode_json(error_document(error, cls.path)) + b"\n"

    def _message_document(self, pieces: Sequence[OutputPiece]) -> Document:
        """Return the response object for pieces of the answer. A tool call that was cut off must
        not be executed, so its name and arguments become text.
        """
        calls = [piece.call for piece in pieces if piece.kind == "call_end" and piece.call]

        cut_off = "".join(
            f"{call.name} {call.arguments}" for call in calls if parse_arguments(call) is None
        )
        message: Document = {
            "role": "assistant",
            "content": _text_of_kind(pieces, "content") + cut_off,
        }
        if thinking := _text_of_kind(pieces, "thinking"):
            message["thinking"] = thinking
        if complete := [
            (call, values) for call in calls if (values := parse_arguments(call)) is not None
        ]:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "function": {"index": index, "name": call.name, "arguments": values},
                }
                for index, (call, values) in enumerate(complete, self._n_calls)
            ]
            self._n_calls += len(complete)
        return {
            "model": self.requested_name,
            "created_at": datetime.now(UTC).isoformat(),
            "message": message,
        }

    def _end_document(self, answers: Sequence[Answer], is_complete: bool = True) -> Document:
        """Return the fields of the last object of a response: the finish reason, token counts and
        times. `is_complete`: the response is not a stream, so the object also gets the
        log-probabilities.
        """
        if not answers:
            return {"done": True, "done_reason": LOAD_REASON}
        (answer,) = answers
        extra = (
            {"logprobs": logprobs.answer_logprobs(self.runner, answer, self._style)}
            if self.has_logprobs and is_complete
            else {}
        )
        return {
            "done": True,
            "done_reason": finish_reason(answer),
            "total_duration": time.perf_counter_ns() - self._started_ns,
            "load_duration": 0,
            "prompt_eval_count": answer.prompt_tokens,
            **disk_counts([answer]),
            "prompt_eval_duration": round(answer.prompt_ms * 1e6),
            "eval_count": len(answer.tokens),
            "eval_duration": round(answer.generate_ms * 1e6),
            **extra,
        }


class OllamaGenerateForm(OllamaChatForm):
    """ollama's generate endpoint. The prompt becomes a user message in the model's chat template.
    With `raw`, or for a model without a template, it is a text to continue. With `suffix`, the
    answer fills the gap before it. With `template`, that is rendered instead.
    """

    path: ClassVar[str] = "/api/generate"
    body_type: ClassVar[type[RequestBody]] = OllamaGenerateBody
    body: OllamaGenerateBody

    def _has_no_prompt(self) -> bool:
        return not self.body.prompt and not self.body.suffix

    def _messages(self) -> list[Document]:
        system = self.body.system
        messages = [{"role": "system", "content": system}] if system else []
        return [*messages, {"role": "user", "content": self.body.prompt or ""}]

    def _tool_definitions(self) -> list[ToolDefinition]:
        return []

    def _render_prompt(self, request: PromptRequest) -> RenderedPrompt:
        body, runner = self.body, self.runner
        bos = runner.model.bos
        is_text = body.raw or body.template or body.suffix or runner.template is None
        if is_text:
            tokens = self._encode_text(request)
            constraint = request.schema.constraint if request.schema else request.constraint
            prompt = RenderedPrompt(tokens, constraint, None, None, NO_TOOLS)
        else:
            prompt = super()._render_prompt(request)
        tokens = prompt.tokens
        if body.context:
            check_tokens(body.context, "context", runner.model.n_vocab)
            # BOS begins the context, and only that
            tokens = (*body.context, *(tokens[1:] if tokens[:1] == (bos,) else tokens))
            if body.truncate:
                size = request_settings.context_tokens(runner, self.settings)
                tokens = request_settings.Truncation().shorten(tokens, size - 1)
        return replace(prompt, tokens=tokens or ((bos or 0),))

    def _encode_text(self, request: PromptRequest) -> tuple[int, ...]:
        """Return the token ids of a prompt without the model's own chat template."""
        runner, settings = self.runner, self.settings
        body, prompt = self.body, self.body.prompt or ""
        truncation = request.truncation or (
            request_settings.Truncation() if body.truncate else None
        )
        if body.template and not body.raw:
            text = go_template.render(
                body.template,
                {
                    "System": body.system or settings.system or "",
                    "Prompt": prompt,
                    "Suffix": body.suffix or "",
                    "Response": "",
                },
            )
            return request_settings.encode_prompt(runner, settings, text, truncation)
        if body.suffix:
            request_settings.check_text_length(runner, settings, prompt)
            before = runner.model.tokenize(prompt, special=False)
            return infill.gap_tokens(runner, settings, before, body.suffix)
        return request_settings.encode_prompt(runner, settings, prompt, truncation)

    def _message_document(self, pieces: Sequence[OutputPiece]) -> Document:
        document = super()._message_document(pieces)
        message = document.pop("message")
        thinking = {"thinking": message["thinking"]} if "thinking" in message else {}
        return {**document, "response": message["content"], **thinking}

    def _end_document(self, answers: Sequence[Answer], is_complete: bool = True) -> Document:
        document = super()._end_document(answers, is_complete)
        if answers and not self.body.raw:
            tokens = [token.id for token in answers[0].tokens]
            document["context"] = [*self.requests[0].tokens, *tokens]
        return document


def _text_of_kind(pieces: Sequence[OutputPiece], kind: str) -> str:
    return "".join(piece.text for piece in pieces if piece.kind == kind)


def find_listed_name(name: str | None, settings: ServerSettings) -> str:
    """Return the name for an answer: the client's own if the model is listed under it, with or
    without ollama's default tag, and otherwise the name of the model that answers.
    """
    return settings.model_name if name is None or not is_listed(name, settings) else name


def is_listed(name: str, settings: ServerSettings) -> bool:
    """Return whether the model has this name, with or without ollama's default tag."""
    bare = name.removesuffix(LATEST_TAG)
    return any(bare in (served, served.removesuffix(LATEST_TAG)) for served in settings.names)


def _response_format(value: str | dict[str, Any] | None) -> Document | None:
    """Translate ollama's `format` to OpenAI's `response_format`."""
    if not value and not isinstance(value, dict):
        return None
    if value == "json":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"schema": value}}


def translate_messages(messages: Sequence[OllamaMessage]) -> list[Document]:
    """Return ollama's messages as OpenAI's messages. Calls without ids, and their results, get ids
    by their order.
    """
    translated: list[Document] = []
    call_numbers, result_numbers = itertools.count(), itertools.count()
    for index, message in enumerate(messages):
        role = message.role.lower()
        extra: Document = {}
        if role == "tool":
            extra = {"tool_call_id": message.tool_call_id or f"call_{next(result_numbers)}"}
        if calls := message.tool_calls:
            extra = {"tool_calls": [_call(call, f"call_{next(call_numbers)}") for call in calls]}
        if message.thinking:
            extra["reasoning_content"] = message.thinking
        text = join_parts(message.content, f"messages[{index}].content", None)
        translated.append({"role": role, "content": text, **extra})
    return translated


def _call(call: OllamaCall, name: str) -> Document:
    arguments = json.dumps(call.function.arguments or {}, ensure_ascii=False)
    return {
        "id": call.id or name,
        "function": {"name": call.function.name, "arguments": arguments},
    }


FORMS = (OllamaChatForm, OllamaGenerateForm)
