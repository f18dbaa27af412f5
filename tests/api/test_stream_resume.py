"""A stream that breaks anywhere resumes in another process without a visible difference."""

import asyncio
import copy
import json
import re
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest

from llmcli.api.forms import FORMS
from llmcli.api.server_settings import ServerSettings
from llmcli.api.stream_resume import (
    MARKS_KEY,
    PastAnswer,
    StreamPosition,
    new_position,
    stream_marks,
)
from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.requests.request import NO_REPLAY, Answer, ReplayedAnswer, Request
from llmcli.runtime.sampling import default_sampling
from llmcli.serve.engine_thread.bridge import EngineBridge, PendingAnswers
from llmcli.serve.http.app import make_app
from llmcli.types import Event, TokenTime
from tests.fixtures.fakes import N_VOCAB, FakeContext, FakeModel, fake_runner
from tests.fixtures.server import CHAT, GREEDY

CALLED = b'<tool_call>\n{"name": "weather", "arguments": {"day": "today"}}\n</tool_call>'
SAID = "<think>so</think>Grüße, 12 \U0001f600 times."
LIMIT = {"max_tokens": 60, "stream": True}
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], **LIMIT}
TEXT = {"prompt": "x", **LIMIT}
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
BODIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(FORMS.keys() - {"/infill"}, ASKED),
    "/v1/completions": TEXT,
    "/completion": TEXT,
    "/api/generate": TEXT,
    "/v1/responses": {"input": "x", "stream": True},
    "logprobs": {**ASKED, "logprobs": True, "top_logprobs": 2},
    "stop": {**ASKED, "stop": ["12", "nowhere"]},
    "beams": {**ASKED, "beams": 2},
    "tools": {**ASKED, "tools": TOOLS},
    "several": {**ASKED, "n": 3, "temperature": 1},
    "several calls": {**ASKED, "n": 2, "tools": TOOLS, "logprobs": True},
    # Of these three the second ends first, and one is as another.
    "/v1/completions several": {
        **TEXT,
        "prompt": ["x", "Gr\u00fc\u00dfe, 12 ", "x"],
        "n": 2,
        "temperature": 1,
    },
    "/v1/completions scored": {
        **TEXT,
        "prompt": ["so", "12 times"],
        "n": 2,
        "logprobs": 1,
        "echo": True,
    },
    "/v1/completions beams": {**TEXT, "prompt": ["x", "12 ti"], "beams": 2, "n": 2},
    "/completion several": {**TEXT, "prompt": ["x", "12 ti"], "n_cmpl": 2, "n_probs": 1},
}
# What is of one answer and not of one text.
OWN = re.compile(
    rb'"(\w+_duration|created_at|completed_at|timings|tokens_cached|cached_tokens|cache_read_input_tokens|input_tokens)":'
    rb'("[^"]*"|\{[^}]*\}|[\d.e-]+|null)'
)


@pytest.fixture(scope="module")
def app() -> Iterator[Any]:
    runner = fake_runner(SAID.encode(), template=CHAT, n_ctx=1024, n_seq_max=4)
    with closing(EngineBridge(runner)) as bridge:
        yield make_app(bridge, ServerSettings(("tiny",), sampling=GREEDY))


def streamed(app: Any, path: str, body: dict[str, Any], known: StreamPosition) -> list[Any]:
    """The messages of an answer of which so much is known."""
    sent: list[Any] = []
    parts = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Any:
        return parts.pop() if parts else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [],
        "query_string": b"",
        "client": None,
    }
    asyncio.run(app(known.attach_to(scope), receive, send))
    assert sent[0]["status"] == 200, sent[1]
    return sent


def raw(sent: list[Any]) -> bytes:
    return OWN.sub(b"", b"".join(one.get("body", b"") for one in sent))


def sorted_by_answer(text: bytes) -> list[bytes]:
    """A stream's events; which of several answers has its next one first is nobody's promise."""
    found = [(re.search(rb'"index":(\d+)', one), one) for one in text.split(b"\n\n")]
    return [one for _, one in sorted(found, key=lambda pair: int(pair[0][1]) if pair[0] else -1)]


@pytest.mark.parametrize("name", sorted(BODIES))
def test_what_another_goes_on_with_is_the_rest(
    app: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PendingAnswers, "has_unread_events", False)  # each event by itself
    path, known = (
        name.split()[0] if name.startswith("/") else "/v1/chat/completions",
        new_position(),
    )
    whole = streamed(app, path, BODIES[name], known)
    assert raw(whole)
    assert whole[-1]["more_body"] is False
    cuts = [at for at in range(len(whole)) if MARKS_KEY in whole[at]]
    assert cuts == list(range(len(whole)))
    for cut in {0, 1, 2, 3, len(whole) // 2, len(whole) - 3, len(whole) - 2} & set(
        range(len(whole) - 1)
    ):
        so_far = copy.deepcopy(known)
        for message in whole[: cut + 1]:
            so_far.advance(message[MARKS_KEY])
        rest = streamed(app, path, BODIES[name], so_far)
        assert sorted_by_answer(raw(whole[: cut + 1]) + raw(rest)) == sorted_by_answer(
            raw(whole)
        ), cut


def test_a_call_keeps_its_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PendingAnswers, "has_unread_events", False)
    body = {"input": "x", "stream": True, "tools": [{"type": "function", "name": "weather"}]}
    runner = fake_runner(CALLED, template=CHAT, n_ctx=1024, n_seq_max=4)
    with closing(EngineBridge(runner)) as bridge:
        app, known = make_app(bridge, ServerSettings(("tiny",), sampling=GREEDY)), new_position()
        whole = streamed(app, "/v1/responses", body, known)
        cut = next(at for at, one in enumerate(whole) if b"arguments.delta" in one.get("body", b""))
        for message in whole[: cut + 1]:
            known.advance(message[MARKS_KEY])
        rest = streamed(app, "/v1/responses", body, known)
    assert raw(whole[: cut + 1]) + raw(rest) == raw(whole)
    assert len(set(re.findall(rb'"call_id":"(\w+)"', raw(whole)))) == 1


def test_each_answer_goes_on_by_itself() -> None:
    """Who goes on may come to the answers in another order, and have a prompt's event that the
    other one had not.
    """
    time = TokenTime(65, "a", 0, 0, 0)
    token, end, prompt = (partial(Event, token=one, text="") for one in (time, None, None))
    first = [token(0), token(1), token(0), end(0, finish="stop"), token(1)]
    known = new_position()
    known.advance(stream_marks(first))
    past = PastAnswer(known)
    assert past.has_started
    again = [
        token(1),
        prompt(1),
        token(1),
        token(1),
        token(0),
        token(2),
        token(0),
        end(0, finish="stop"),
    ]
    assert [past.includes(one) for one in again] == [
        True,
        False,
        True,
        False,
        True,
        False,
        True,
        True,
    ]
    assert not past.includes(end(1, finish="stop"))


class Places(FakeContext):
    """Logits depend on the place alone."""

    def _logits(self, tokens: Any) -> Any:
        return np.random.default_rng(len(tokens)).normal(0, 2, N_VOCAB).astype(np.float32)


def drawn(*known: ReplayedAnswer) -> list[Answer]:
    """The answers of as many samples."""
    model = FakeModel()
    machine = Engine(Places(n_seq_max=len(known)), model, None)
    sampling = default_sampling().with_values(
        {"temp": 1, "top_k": 0, "seed": 5, "xtc_probability": 0.5}
    )
    ids = machine.submit_samples(
        Request((65, 66), sampling, max_tokens=24, ignore_eos=True, replays=known), len(known)
    )
    while machine.is_busy:
        machine.step()
    return [machine.pop_answer(one) for one in ids]


def ids(answer: Answer) -> list[int]:
    return [token.id for token in answer.tokens]


def test_known_tokens_leave_the_chances_where_they_were() -> None:
    """What is drawn behind known tokens is what was drawn without them."""
    (alone,) = map(ids, drawn(NO_REPLAY))
    assert len(set(alone)) > 8
    others = tuple(token ^ 1 for token in alone[:9])
    assert list(map(ids, drawn(ReplayedAnswer(others)))) == [[*others, *alone[9:]]]


def test_of_several_samples_each_has_its_own() -> None:
    """And one that had ended ends there, whatever would be drawn next."""
    alone = drawn(NO_REPLAY, NO_REPLAY, NO_REPLAY, NO_REPLAY)
    assert ids(alone[0]) != ids(alone[1])
    known = [
        ReplayedAnswer(tuple(ids(one)[:count]))
        for one, count in zip(alone, (0, 3, 7, 0), strict=True)
    ]
    known[2:] = ReplayedAnswer(known[2].tokens, "stop"), ReplayedAnswer((), "context_full")
    again = drawn(*known)
    assert list(map(ids, again)) == [ids(alone[0]), ids(alone[1]), ids(alone[2])[:7], []]
    assert [one.finish for one in again] == ["length", "length", "stop", "context_full"]


def test_answers_of_one_prompt_given_twice_differ(app: Any) -> None:
    body = {**TEXT, "prompt": ["x", "x"], "temperature": 10, "top_k": 0, "top_p": 1, "min_p": 0}
    texts = ["", ""]
    for message in streamed(app, "/v1/completions", body, new_position()):
        for line in message.get("body", b"").splitlines():
            for choice in json.loads(line[6:])["choices"] if line.startswith(b"data: {") else ():
                texts[choice["index"]] += choice["text"]
    assert texts[0] != texts[1]
