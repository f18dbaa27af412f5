"""`/api/chat` and `/api/generate`: ollama's way to ask, for the programs that know no other. It is
Chat in other words.

A line of JSON for each piece, streamed unless told otherwise; durations in nanoseconds. How a model
is loaded and how long it is kept (num_ctx, num_thread, keep_alive, …) is the server's and passed
over; a prompt that does not fit is an error with the numbers, never cut without a word.
"""

import itertools
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.request import Answer
from llmcli.runtime.runner import Runner
from llmcli.serve.calls.base import given
from llmcli.serve.problems import Problem, document
from llmcli.serve.schema import logprobs
from llmcli.serve.schema import settings as common
from llmcli.serve.schema.base import Document, encoded, reason
from llmcli.serve.schema.calling import Heard
from llmcli.serve.schema.conversation import Conversation
from llmcli.serve.schema.fields import Fields
from llmcli.serve.schema.messages import MOST
from llmcli.serve.schema.prompt import Prompt, Wanted, prompt
from llmcli.serve.schema.tools import NO_TOOLS
from llmcli.serve.settings import Settings
from llmcli.types import Event

LATEST = ":latest"  # what ollama's clients add to a name
LIMIT = "num_predict"
# Ours by theirs, where a request has it at its top.
KEPT = ("messages", "tools", "logprobs", "top_logprobs", "model")
LOADING = "load"  # of a request that asks for nothing, by which clients have a model loaded


class OllamaChat(Conversation):
    """ollama's conversations."""

    path: ClassVar[str] = "/api/chat"
    prefix: ClassVar[str] = "ollama-"
    media_type: ClassVar[str] = "application/x-ndjson"
    last: ClassVar[bytes] = b""
    ping: ClassVar[bytes] = b""  # a line that is no JSON would be an error to them

    def __init__(self, body: Mapping[str, Any], runner: Runner, settings: Settings) -> None:
        self._began = time.perf_counter_ns()
        fields = Fields(body)
        self._words = fields.text("prompt") or ""
        self._raw = fields.flag("raw") or runner.template is None
        self._called = 0  # functions so far
        super().__init__(self._openai(fields, settings), runner, settings)
        self.stream = fields.flag("stream", True)
        self.name = fields.text("model") or settings.name
        if self._nothing(fields):
            self.requests, self.constraint = (), None

    def _nothing(self, fields: Fields) -> bool:
        return not fields.values.get("messages")

    def _openai(self, fields: Fields, settings: Settings) -> Document:
        """The document that would ask the same of /v1/chat/completions."""
        options = fields.table("options") or Fields({})
        found: Document = {name: value for name, value in options.values.items() if name != LIMIT}
        found |= {name: fields.values[name] for name in KEPT if fields.has(name)}
        if (most := options.whole(LIMIT, -2, 2**31 - 1, -1)) is not None and most >= 0:
            found["max_tokens"] = most
        found["model"] = known(fields.text("model"), settings)
        if (wanted := fields.values.get("format")) not in (None, ""):
            found["response_format"] = _format(fields, wanted)
        if (think := fields.values.get("think")) is not None:
            found["reasoning_effort"] = (
                ("medium" if think else "none") if isinstance(think, bool) else think
            )
        found["messages"] = _messages(fields) or [{"role": "user", "content": ""}]
        found["continue_final_message"] = False
        return found

    @property
    def each(self) -> int:
        """One answer, whatever `n` is among the options."""
        return 1

    def whole(self, answers: Sequence[Answer]) -> Document:
        """One object with everything."""
        heard: list[Heard] = []
        for answer in answers:
            listener = self.prompt.listener()
            heard = [*listener.feed(answer.text), *listener.finish()]
        return {**self._piece(heard), **self._last(answers)}

    def begin(self) -> Iterable[Document]:
        """Nothing: their streams begin with the first piece."""
        self.begun = True
        return []

    def show(self, event: Event) -> Iterable[Document]:
        """What an event adds."""
        heard = self._heard[0].feed(event.text)
        about = logprobs.of_event(self.runner, event) if self.logprobs else None
        if not any(one.kind not in ("call", "arguments") for one in heard) and not about:
            return []
        return [
            {
                **self._piece(heard),
                "done": False,
                **({"logprobs": about["content"]} if about else {}),
            }
        ]

    def end(self, answers: Sequence[Answer]) -> Iterable[Document]:
        """What was held back, and the counts."""
        if self.requests and (heard := self._heard[0].finish()):
            yield {**self._piece(heard), "done": False}
        yield {**self._piece([]), **self._last(answers, whole=False)}

    def written(self, chunks: Iterable[Document]) -> bytes:
        """Objects, a line each."""
        return b"".join(encoded(chunk) + b"\n" for chunk in chunks)

    @classmethod
    def failed(cls, error: Problem) -> bytes:
        """A line that says why."""
        return encoded(document(error, cls.path)) + b"\n"

    def _piece(self, heard: Iterable[Heard]) -> Document:
        found = list(heard)
        calls = [one.call for one in found if one.kind == "called" and one.call]
        # One that was cut off must not be made: it is text.
        cut = "".join(f"{one.name} {one.arguments}" for one in calls if given(one) is None)
        message: Document = {"role": "assistant", "content": _of(found, "said") + cut}
        if thought := _of(found, "thought"):
            message["thinking"] = thought
        if made := [(one, values) for one in calls if (values := given(one)) is not None]:
            message["tool_calls"] = [
                {"id": one.id, "function": {"index": at, "name": one.name, "arguments": values}}
                for at, (one, values) in enumerate(made, self._called)
            ]
            self._called += len(made)
        return {"model": self.name, "created_at": datetime.now(UTC).isoformat(), "message": message}

    def _last(self, answers: Sequence[Answer], whole: bool = True) -> Document:
        if not answers:
            return {"done": True, "done_reason": LOADING}
        (answer,) = answers
        more = (
            {"logprobs": logprobs.content(self.runner, answer)} if self.logprobs and whole else {}
        )
        return {
            "done": True,
            "done_reason": reason(answer),
            "total_duration": time.perf_counter_ns() - self._began,
            "load_duration": 0,
            "prompt_eval_count": answer.prompt_tokens,
            "prompt_eval_duration": round(answer.prompt_ms * 1e6),
            "eval_count": len(answer.tokens),
            "eval_duration": round(answer.generate_ms * 1e6),
            **more,
        }


class Generate(OllamaChat):
    """ollama's single answers: one message through the template, or with `raw` a text that is gone
    on with.
    """

    path: ClassVar[str] = "/api/generate"
    refused: ClassVar[dict[str, str]] = {
        "context": "send the conversation to /api/chat",
        "suffix": "text is gone on with at its end, not filled in",
        "template": "raw takes a text as it is",
        "images": "this server reads text",
    }

    def _nothing(self, fields: Fields) -> bool:
        return not self._words

    def _openai(self, fields: Fields, settings: Settings) -> Document:
        said = [{"role": "system", "content": system}] if (system := fields.text("system")) else []
        said.append({"role": "user", "content": self._words})
        refused = {name: fields.values.get(name) for name in self.refused}
        return {**super()._openai(Fields({**fields.values, "messages": said}), settings), **refused}

    def _prompt(self, wanted: Wanted, runner: Runner, settings: Settings) -> Prompt:
        if not self._raw:
            return prompt(wanted, runner, settings)
        tokens = common.encoded(runner, settings, self._words) or ((runner.model.bos or 0),)
        form = (
            None if wanted.format is None else Constraint("json_schema", json.dumps(wanted.format))
        )
        return Prompt(tokens, form, None, None, NO_TOOLS)

    def _piece(self, heard: Iterable[Heard]) -> Document:
        found = super()._piece(heard)
        message = found.pop("message")
        thought = {"thinking": message["thinking"]} if "thinking" in message else {}
        return {**found, "response": message["content"], **thought}


def _of(heard: Sequence[Heard], sort: str) -> str:
    return "".join(one.text for one in heard if one.kind == sort)


def known(name: str | None, settings: Settings) -> str | None:
    """A name as it is served: with and without what their clients add to it."""
    if name is None or name in settings.names:
        return name
    bare = name.removesuffix(LATEST)
    return next((one for one in settings.names if bare in (one, one.removesuffix(LATEST))), name)


def _format(fields: Fields, wanted: object) -> Document:
    if wanted == "json":
        return {"type": "json_object"}
    if not isinstance(wanted, dict):
        raise fields.wrong("format", "json or a JSON schema")
    return {"type": "json_schema", "json_schema": {"schema": wanted}}


def _messages(fields: Fields) -> list[Document]:
    """Theirs in OpenAI's form: calls have no ids there, and results follow them in order."""
    said: list[Document] = []
    made, answered = itertools.count(), itertools.count()
    for one in fields.tables("messages", MOST):
        if one.values.get("images"):
            raise Problem(f"{one.at('images')}: this server reads text", param=one.at("images"))
        role = one.needed("role")
        more: Document = {}
        if role == "tool":
            more = {"tool_call_id": one.text("tool_call_id") or f"call_{next(answered)}"}
        if calls := [_call(call, f"call_{next(made)}") for call in one.tables("tool_calls")]:
            more = {"tool_calls": calls}
        if thinking := one.text("thinking"):
            more["reasoning_content"] = thinking
        said.append({"role": role, "content": one.text("content", ""), **more})
    return said


def _call(fields: Fields, name: str) -> Document:
    inner = fields.table("function")
    if inner is None:
        raise Problem(f"{fields.at('function')} is missing", param=fields.at("function"))
    given = json.dumps(inner.values.get("arguments") or {})
    return {
        "id": fields.text("id") or name,
        "function": {"name": inner.needed("name"), "arguments": given},
    }


FORMS = (OllamaChat, Generate)
