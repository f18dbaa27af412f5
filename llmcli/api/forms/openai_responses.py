"""`/v1/responses`: OpenAI's newer API. This server stores nothing between two requests, so each
request must contain the whole conversation.
"""

import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

from llmcli.api.errors import ApiError
from llmcli.api.fields import Fields
from llmcli.api.forms import common_fields as common
from llmcli.api.forms import logprobs
from llmcli.api.forms.base import ApiForm, Document, encode_named_events, finish_reason, token_usage
from llmcli.api.forms.prompt import (
    PromptRequest,
    read_answer_schema,
    read_template_variables,
    render_prompt,
)
from llmcli.api.forms.responses_input import read_conversation
from llmcli.api.forms.responses_output import ResponseOutput
from llmcli.api.forms.tool_call_stream import OutputPiece
from llmcli.api.forms.tools import read_tools
from llmcli.api.server_settings import ServerSettings
from llmcli.runtime.requests.request import Answer, Request
from llmcli.runtime.runner import Runner
from llmcli.types import Event, TokenTime

LIMIT_FIELDS = ("max_output_tokens",)
LOGPROBS_INCLUDE = "message.output_text.logprobs"
STATELESS = "this server stores nothing between two requests: send the whole conversation as input"


class ResponsesForm(ApiForm):
    """OpenAI's Responses API. The response contains a list of output items: reasoning, a message,
    function calls.
    """

    path: ClassVar[str] = "/v1/responses"
    id_prefix: ClassVar[str] = "resp_"
    end_marker: ClassVar[bytes] = b""
    refused_fields: ClassVar[dict[str, str]] = {
        "previous_response_id": STATELESS,
        "conversation": STATELESS,
        "background": STATELESS,
        "prompt": "send the prompt itself",
    }

    def __init__(self, body: Mapping[str, Any], runner: Runner, settings: ServerSettings) -> None:
        super().__init__(body, runner, settings)
        fields = self.fields
        if fields.choice("truncation", ("disabled", "auto"), "disabled") == "auto":
            raise ApiError(
                "truncation auto is not supported: a conversation is never shortened",
                param="truncation",
            )
        text = fields.table("text") or Fields({})
        self.tools = read_tools(fields, is_nested=False)
        prompt_request = PromptRequest(
            read_conversation(fields),
            self.tools,
            read_answer_schema(text, "format"),
            variables=self._template_variables(),
        )
        self.prompt = render_prompt(prompt_request, runner, settings)
        self.constraint = self.prompt.constraint
        options = common.read_common_fields(fields, settings, LIMIT_FIELDS)
        self.has_logprobs = LOGPROBS_INCLUDE in fields.texts("include", 100)
        top = fields.integer("top_logprobs", 0, logprobs.MAX_ALTERNATIVES, 0) or 0
        self.limit = common.read_limit(fields, LIMIT_FIELDS)
        tokens, opened_tags = self.prompt.tokens, self.prompt.opened_tags
        max_tokens = common.answer_budget(
            runner, settings, len(tokens), common.effective_limit(self.limit, settings)
        )
        context = common.context_fields(fields, runner, settings, len(tokens))
        self.requests = (
            Request(
                tokens,
                max_tokens=max_tokens,
                grammar_after=opened_tags.closing if opened_tags else "",
                **context,
                **common.with_logprobs(options, runner, self.has_logprobs, top),
            ),
        )
        self.check_requests()
        self._n_ids = 0
        # log-probabilities of tokens whose text was not sent yet
        self._pending_logprobs: list[Document] = []
        self._output, self._splitter, self._sequence_number = (
            ResponseOutput(self._make_digits),
            self.prompt.new_splitter(self._make_digits),
            0,
        )

    def _make_digits(self) -> str:
        """Return 32 hexadecimal digits for the next item or call id. They are derived from the
        response's id and a counter, so that a process that resumes the stream makes the same ids.
        """
        self._n_ids += 1
        return uuid.uuid5(uuid.UUID(self.id.removeprefix(self.id_prefix)), str(self._n_ids)).hex

    def _template_variables(self) -> dict[str, Any]:
        reasoning = self.fields.table("reasoning")
        effort = reasoning.text("effort") if reasoning else None
        more = {} if effort is None else {"reasoning_effort": effort}
        return read_template_variables(Fields({**self.fields.values, **more}), self.runner.template)

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
            self._pending_logprobs.append(logprobs.token_logprobs(self.runner, token, top))
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
        fields, request = self.fields, self.requests[0]
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
            "instructions": fields.text("instructions"),
            "max_output_tokens": self.limit,
            "model": self.model,
            "output": list(output.items),
            "parallel_tool_calls": self.tools.allows_parallel,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": request.sampling["temp"],
            "top_p": request.sampling["top_p"],
            "text": fields.values.get("text") or {"format": {"type": "text"}},
            "tool_choice": {"type": "function", "name": choice}
            if self.tools.names_function
            else choice,
            "tools": [{"strict": False, **tool.values} for tool in fields.tables("tools")],
            "truncation": "disabled",
            "usage": None if answer is None else self._usage(answer),
            "metadata": fields.values.get("metadata") or {},
        }

    def _usage(self, answer: Answer) -> Document:
        counts = token_usage([answer])
        return {
            "input_tokens": counts["prompt_tokens"],
            "output_tokens": counts["completion_tokens"],
            "total_tokens": counts["total_tokens"],
            "input_tokens_details": {
                "cached_tokens": answer.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens_details": {"reasoning_tokens": self.prompt.count_thinking(answer)},
        }


def _status(answer: Answer) -> str:
    return "completed" if finish_reason(answer) == "stop" else "incomplete"


FORMS = (ResponsesForm,)
