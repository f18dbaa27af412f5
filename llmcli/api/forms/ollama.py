"""`/api/chat` and `/api/generate`: ollama's API, for clients that support no other API. A request
is translated to one for OpenAI's chat completions.

Responses are lines of JSON; they are streamed unless the request sets `stream` to false. Durations
are in nanoseconds. Options that control how a model is loaded and how long it stays loaded
(num_ctx, num_thread, keep_alive, …) are ignored. A prompt that does not fit into the context is
refused, and never shortened as in ollama.
"""

import itertools
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

from llmcli.api.errors import ApiError, error_document
from llmcli.api.fields import Fields
from llmcli.api.forms import common_fields as common
from llmcli.api.forms import logprobs
from llmcli.api.forms.base import Document, encode_json, finish_reason
from llmcli.api.forms.conversation import ConversationForm
from llmcli.api.forms.messages import MAX_MESSAGES
from llmcli.api.forms.prompt import PromptRequest, RenderedPrompt, render_prompt
from llmcli.api.forms.tool_call_stream import OutputPiece
from llmcli.api.forms.tools import NO_TOOLS
from llmcli.api.server_settings import ServerSettings
from llmcli.api.tool_calls.base import parse_arguments
from llmcli.runtime.requests.request import Answer
from llmcli.runtime.runner import Runner
from llmcli.types import Event

LATEST_TAG = ":latest"  # ollama's clients add it to a name
LIMIT_FIELD = "num_predict"
# Fields that have the same name in OpenAI's document.
COPIED_FIELDS = ("messages", "tools", "logprobs", "top_logprobs", "model")
# finish reason for a request without a prompt, which clients send to load a model
LOAD_REASON = "load"


class OllamaChatForm(ConversationForm):
    """ollama's chat endpoint. A request without messages, which clients send to load a model, has
    no `requests` for the engine.
    """

    path: ClassVar[str] = "/api/chat"
    id_prefix: ClassVar[str] = "ollama-"
    media_type: ClassVar[str] = "application/x-ndjson"
    end_marker: ClassVar[bytes] = b""
    ping: ClassVar[bytes] = b""  # these streams have no comments: every line must be JSON

    def __init__(self, body: Mapping[str, Any], runner: Runner, settings: ServerSettings) -> None:
        self._started_ns = time.perf_counter_ns()
        fields = Fields(body)
        self._prompt_text = fields.text("prompt") or ""
        self._raw = fields.flag("raw") or runner.template is None
        self._n_calls = 0  # number of tool calls in the answer so far
        super().__init__(self._openai_document(fields, settings), runner, settings)
        self.is_stream = fields.flag("stream", True)
        self.requested_name = fields.text("model") or settings.model_name
        if self._has_no_prompt(fields):
            self.requests, self.constraint = (), None

    def _has_no_prompt(self, fields: Fields) -> bool:
        return not fields.values.get("messages")

    def _openai_document(self, fields: Fields, settings: ServerSettings) -> Document:
        """Translate ollama's request to a request for /v1/chat/completions."""
        options = fields.table("options") or Fields({})
        document: Document = {
            name: value for name, value in options.values.items() if name != LIMIT_FIELD
        }
        document |= {name: fields.values[name] for name in COPIED_FIELDS if fields.has(name)}
        if (limit := options.integer(LIMIT_FIELD, -2, 2**31 - 1, -1)) is not None and limit >= 0:
            document["max_tokens"] = limit
        document["model"] = find_served_name(fields.text("model"), settings)
        if (format_ := fields.values.get("format")) not in (None, ""):
            document["response_format"] = _format(fields, format_)
        if (think := fields.values.get("think")) is not None:
            document["reasoning_effort"] = (
                ("medium" if think else "none") if isinstance(think, bool) else think
            )
        document["messages"] = _messages(fields) or [{"role": "user", "content": ""}]
        document["continue_final_message"] = False
        return document

    @property
    def n_samples(self) -> int:
        """Number of answers: always 1, even if the options contain `n`, because ollama's responses
        have only one.
        """
        return 1

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
            logprobs.event_logprobs(self.runner, event) if self.has_logprobs else None
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
            {"logprobs": logprobs.answer_logprobs(self.runner, answer)}
            if self.has_logprobs and is_complete
            else {}
        )
        return {
            "done": True,
            "done_reason": finish_reason(answer),
            "total_duration": time.perf_counter_ns() - self._started_ns,
            "load_duration": 0,
            "prompt_eval_count": answer.prompt_tokens,
            "prompt_eval_duration": round(answer.prompt_ms * 1e6),
            "eval_count": len(answer.tokens),
            "eval_duration": round(answer.generate_ms * 1e6),
            **extra,
        }


class OllamaGenerateForm(OllamaChatForm):
    """ollama's generate endpoint. The prompt becomes a user message in the model's chat template.
    With `raw`, or for a model without a template, it is a text to continue.
    """

    path: ClassVar[str] = "/api/generate"
    refused_fields: ClassVar[dict[str, str]] = {
        "context": "send the conversation to /api/chat",
        "suffix": "a text is continued at its end; /infill fills a gap",
        "template": "use raw to send a text as it is",
        "images": "this server reads only text",
    }

    def _has_no_prompt(self, fields: Fields) -> bool:
        return not self._prompt_text

    def _openai_document(self, fields: Fields, settings: ServerSettings) -> Document:
        messages = (
            [{"role": "system", "content": system}] if (system := fields.text("system")) else []
        )
        messages.append({"role": "user", "content": self._prompt_text})
        refused = {name: fields.values.get(name) for name in self.refused_fields}
        return {
            **super()._openai_document(Fields({**fields.values, "messages": messages}), settings),
            **refused,
        }

    def _render_prompt(
        self, request: PromptRequest, runner: Runner, settings: ServerSettings
    ) -> RenderedPrompt:
        if not self._raw:
            return render_prompt(request, runner, settings)
        tokens = common.encode_prompt(runner, settings, self._prompt_text) or (
            (runner.model.bos or 0),
        )
        constraint = None if request.schema is None else request.schema.constraint
        return RenderedPrompt(tokens, constraint, None, None, NO_TOOLS)

    def _message_document(self, pieces: Sequence[OutputPiece]) -> Document:
        document = super()._message_document(pieces)
        message = document.pop("message")
        thinking = {"thinking": message["thinking"]} if "thinking" in message else {}
        return {**document, "response": message["content"], **thinking}


def _text_of_kind(pieces: Sequence[OutputPiece], kind: str) -> str:
    return "".join(piece.text for piece in pieces if piece.kind == kind)


def find_served_name(name: str | None, settings: ServerSettings) -> str | None:
    """Return the served name that fits a client's model name, which may have or lack ollama's
    default tag. If no served name fits, return the client's name unchanged.
    """
    if name is None or name in settings.names:
        return name
    bare = name.removesuffix(LATEST_TAG)
    return next(
        (served for served in settings.names if bare in (served, served.removesuffix(LATEST_TAG))),
        name,
    )


def _format(fields: Fields, value: object) -> Document:
    """Translate ollama's `format` to OpenAI's `response_format`."""
    if value == "json":
        return {"type": "json_object"}
    if not isinstance(value, dict):
        raise fields.type_error("format", "json or a JSON schema")
    return {"type": "json_schema", "json_schema": {"schema": value}}


def _messages(fields: Fields) -> list[Document]:
    """Return ollama's messages as OpenAI's messages. Calls without ids, and their results, get ids
    by their order.
    """
    messages: list[Document] = []
    call_numbers, result_numbers = itertools.count(), itertools.count()
    for message in fields.tables("messages", MAX_MESSAGES):
        if message.values.get("images"):
            raise ApiError(
                f"{message.path_of('images')}: this server reads only text",
                param=message.path_of("images"),
            )
        role = message.required_text("role")
        extra: Document = {}
        if role == "tool":
            extra = {"tool_call_id": message.text("tool_call_id") or f"call_{next(result_numbers)}"}
        if calls := [
            _call(call, f"call_{next(call_numbers)}") for call in message.tables("tool_calls")
        ]:
            extra = {"tool_calls": calls}
        if thinking := message.text("thinking"):
            extra["reasoning_content"] = thinking
        messages.append({"role": role, "content": message.text("content", ""), **extra})
    return messages


def _call(fields: Fields, name: str) -> Document:
    inner = fields.table("function")
    if inner is None:
        raise ApiError(f"{fields.path_of('function')} is missing", param=fields.path_of("function"))
    arguments = json.dumps(inner.values.get("arguments") or {}, ensure_ascii=False)
    return {
        "id": fields.text("id") or name,
        "function": {"name": inner.required_text("name"), "arguments": arguments},
    }


FORMS = (OllamaChatForm, OllamaGenerateForm)
