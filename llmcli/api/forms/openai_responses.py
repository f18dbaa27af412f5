"""`/v1/responses`: OpenAI's newer form. The server stores nothing between two requests: each
request brings the whole conversation.
"""

import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

from llmcli.api.errors import Problem
from llmcli.api.fields import Fields
from llmcli.api.forms import common_fields as common
from llmcli.api.forms import logprobs
from llmcli.api.forms.base import Document, Form, named, reason, usage
from llmcli.api.forms.prompt import Wanted, answer_format, prompt, variables
from llmcli.api.forms.responses_input import conversation
from llmcli.api.forms.responses_output import Output
from llmcli.api.forms.tool_call_stream import Heard
from llmcli.api.forms.tools import tools
from llmcli.api.server_settings import Settings
from llmcli.runtime.requests.request import Answer, Request
from llmcli.runtime.runner import Runner
from llmcli.types import Event, TokenTime

LIMITS = ("max_output_tokens",)
LOGPROBS = "message.output_text.logprobs"
KEPT = "this server stores nothing between two requests: send the whole conversation as input"


class Responses(Form):
    """OpenAI's responses: one answer as a list of items."""

    path: ClassVar[str] = "/v1/responses"
    prefix: ClassVar[str] = "resp_"
    last: ClassVar[bytes] = b""
    refused: ClassVar[dict[str, str]] = {
        "previous_response_id": KEPT,
        "conversation": KEPT,
        "background": KEPT,
        "prompt": "send the prompt itself",
    }

    def __init__(self, body: Mapping[str, Any], runner: Runner, settings: Settings) -> None:
        super().__init__(body, runner, settings)
        fields = self.fields
        if fields.choice("truncation", ("disabled", "auto"), "disabled") == "auto":
            raise Problem(
                "truncation auto is not supported: a conversation is never shortened",
                param="truncation",
            )
        text = fields.table("text") or Fields({})
        self.offered = tools(fields, nested=False)
        wanted = Wanted(
            conversation(fields),
            self.offered,
            answer_format(text, "format"),
            variables=self._template_variables(),
        )
        self.prompt = prompt(wanted, runner, settings)
        self.constraint = self.prompt.constraint
        options = common.common(fields, settings, LIMITS)
        self.logprobs = LOGPROBS in fields.words("include", 100)
        top = fields.whole("top_logprobs", 0, logprobs.MOST, 0) or 0
        self.limit = common.asked_limit(fields, LIMITS)
        tokens, opened = self.prompt.tokens, self.prompt.opened
        max_tokens = common.room(runner, settings, len(tokens), common.limit(self.limit, settings))
        options = {
            "strategy": runner.strategy(),
            **options,
            "logprobs": self.logprobs,
            "top_logprobs": top,
        }
        self.requests = (
            Request(
                tokens, max_tokens=max_tokens, after=opened.closes if opened else "", **options
            ),
        )
        self.check()
        self._n_ids = 0
        # Log-probabilities of tokens whose text was not streamed yet.
        self._pending_logprobs: list[Document] = []
        self._output, self._listener, self._number = (
            Output(self._digits),
            self.prompt.listener(self._digits),
            0,
        )

    def _digits(self) -> str:
        """Return the digits of the next id. Ids occur in many events, and a model that continues
        the stream must make the same ones.
        """
        self._n_ids += 1
        return uuid.uuid5(uuid.UUID(self.id.removeprefix(self.prefix)), str(self._n_ids)).hex

    def _template_variables(self) -> dict[str, Any]:
        reasoning = self.fields.table("reasoning")
        effort = reasoning.text("effort") if reasoning else None
        more = {} if effort is None else {"reasoning_effort": effort}
        return variables(Fields({**self.fields.values, **more}), self.runner.template)

    def whole(self, answers: Sequence[Answer]) -> Document:
        """Return the response with its items."""
        (answer,) = answers
        top = answer.top or ((),) * len(answer.tokens)
        position = 0
        for token, ranked in zip(answer.tokens, top, strict=True) if self.logprobs else ():
            deque(self._token_events(token.text, token, ranked), maxlen=0)
            position += len(token.text)
        deque(
            chain(self._token_events(answer.text[position:]), self._closing_events(answer)),
            maxlen=0,
        )
        return self._response(self._output, answer)

    def begin(self) -> Iterable[Document]:
        """Return the events that the request was accepted."""
        self.begun = True
        return self._numbered(
            {"type": f"response.{name}", "response": self._response(self._output, None)}
            for name in ("created", "in_progress")
        )

    def show(self, event: Event) -> Iterable[Document]:
        """Return the events for what an engine event adds to the items."""
        return self._numbered(self._token_events(event.text, event.token, event.top))

    def _token_events(
        self, text: str, token: TokenTime | None = None, top: Sequence[tuple[int, float]] = ()
    ) -> Iterator[Document]:
        """Yield the events for a token, or for text without one. A token's log-probability is sent
        with its text; tokens of thinking and of tool calls have none.
        """
        if self.logprobs and token:
            self._pending_logprobs.append(logprobs.token(self.runner, token, top))
        yield from self._item_events(self._listener.feed(text))

    def _closing_events(self, answer: Answer) -> Iterator[Document]:
        """Yield the events for what was held back and for the end of the open item."""
        yield from self._item_events(self._listener.finish())
        yield from self._output.close(_status(answer))

    def _item_events(self, heard: Sequence[Heard]) -> Iterator[Document]:
        for piece in heard:
            yield from self._output.hear(
                piece, self._pending_logprobs if piece.kind == "content" else None
            )
            self._pending_logprobs = []

    def end(self, answers: Sequence[Answer]) -> Iterable[Document]:
        """Yield the remaining events, then the whole response."""
        (answer,) = answers
        yield from self._numbered(self._closing_events(answer))
        event = {
            "type": f"response.{_status(answer)}",
            "response": self._response(self._output, answer),
        }
        yield from self._numbered([event])

    def written(self, chunks: Iterable[Document]) -> bytes:
        """Encode events with their names."""
        return named(chunks)

    def _numbered(self, events: Iterable[Document]) -> Iterator[Document]:
        for event in events:
            yield {**event, "sequence_number": self._number}
            self._number += 1

    def _response(self, output: Output, answer: Answer | None) -> Document:
        fields, request = self.fields, self.requests[0]
        status = "in_progress" if answer is None else _status(answer)
        choice: Any = self.offered.choice
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
            "parallel_tool_calls": self.offered.parallel,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": request.sampling["temp"],
            "top_p": request.sampling["top_p"],
            "text": fields.values.get("text") or {"format": {"type": "text"}},
            "tool_choice": {"type": "function", "name": choice} if self.offered.named else choice,
            "tools": [{"strict": False, **tool.values} for tool in fields.tables("tools")],
            "truncation": "disabled",
            "usage": None if answer is None else self._usage(answer),
            "metadata": fields.values.get("metadata") or {},
        }

    def _usage(self, answer: Answer) -> Document:
        counts = usage([answer])
        return {
            "input_tokens": counts["prompt_tokens"],
            "output_tokens": counts["completion_tokens"],
            "total_tokens": counts["total_tokens"],
            "input_tokens_details": {
                "cached_tokens": answer.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens_details": {"reasoning_tokens": self.prompt.thought(answer)},
        }


def _status(answer: Answer) -> str:
    return "completed" if reason(answer) == "stop" else "incomplete"


FORMS = (Responses,)
