"""A stream that breaks at any event is resumed by another process, and the client notices no
difference.
"""

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

CALL = b'<tool_call>\n{"name": "weather", "arguments": {"day": "today"}}\n</tool_call>'
ANSWER_TEXT = "<think>so</think>Grüße, 12 \U0001f600 times."
LIMIT = {"max_tokens": 60, "stream": True}
CHAT_BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], **LIMIT}
PROMPT_BODY = {"prompt": "x", **LIMIT}
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
BODIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(FORMS.keys() - {"/infill"}, CHAT_BODY),
    "/v1/completions": PROMPT_BODY,
    "/completion": PROMPT_BODY,
    "/api/generate": PROMPT_BODY,
    "/v1/responses": {"input": "x", "stream": True},
    "logprobs": {**CHAT_BODY, "logprobs": True, "top_logprobs": 2},
    "stop": {**CHAT_BODY, "stop": ["12", "nowhere"]},
    "beams": {**CHAT_BODY, "beams": 2},
    "tools": {**CHAT_BODY, "tools": TOOLS},
    "several": {**CHAT_BODY, "n": 3, "temperature": 1},
    "several calls": {**CHAT_BODY, "n": 2, "tools": TOOLS, "logprobs": True},
    # the second prompt's answer ends first; the first and the third are equal
    "/v1/completions several": {
        **PROMPT_BODY,
        "prompt": ["x", "Gr\u00fc\u00dfe, 12 ", "x"],
        "n": 2,
        "temperature": 1,
    },
    "/v1/completions scored": {
        **PROMPT_BODY,
        "prompt": ["so", "12 times"],
        "n": 2,
        "logprobs": 1,
        "echo": True,
    },
    "/v1/completions beams": {**PROMPT_BODY, "prompt": ["x", "12 ti"], "beams": 2, "n": 2},
    "/completion several": {**PROMPT_BODY, "prompt": ["x", "12 ti"], "n_cmpl": 2, "n_probs": 1},
}
# fields whose values differ between two responses with the same text
VOLATILE_FIELDS = re.compile(
    rb'"(\w+_duration|created_at|completed_at|timings|tokens_cached|cached_tokens|cache_read_input_tokens|input_tokens|id_slot)":'
    rb'("[^"]*"|\{[^}]*\}|[\d.e-]+|null)'
)


@pytest.fixture(scope="module")
def app() -> Iterator[Any]:
    runner = fake_runner(ANSWER_TEXT.encode(), template=CHAT, n_ctx=1024, n_seq_max=4)
    with closing(EngineBridge(runner)) as bridge:
        yield make_app(bridge, ServerSettings(("tiny",), sampling=GREEDY))


def run_request(app: Any, path: str, body: dict[str, Any], position: StreamPosition) -> list[Any]:
    """Return the ASGI messages of the response to a request that resumes at `position`."""
    sent: list[Any] = []
    unread_messages = [
        {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
    ]

    async def receive() -> Any:
        return unread_messages.pop() if unread_messages else await asyncio.Event().wait()

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
    asyncio.run(app(position.attach_to(scope), receive, send))
    assert sent[0]["status"] == 200, sent[1]
    return sent


def raw(sent: list[Any]) -> bytes:
    return VOLATILE_FIELDS.sub(b"", b"".join(entry.get("body", b"") for entry in sent))


def sorted_by_answer(text: bytes) -> list[bytes]:
    """Return the events of a stream, ordered by answer, because the events of several answers may
    interleave in any order.
    """
    found = [(re.search(rb'"index":(\d+)', entry), entry) for entry in text.split(b"\n\n")]
    return [
        entry for _, entry in sorted(found, key=lambda pair: int(pair[0][1]) if pair[0] else -1)
    ]


@pytest.mark.parametrize("name", sorted(BODIES))
def test_a_resumed_stream_completes_the_interrupted_stream(
    app: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PendingAnswers, "has_unread_events", False)  # each event is sent separately
    path, position = (
        name.split()[0] if name.startswith("/") else "/v1/chat/completions",
        new_position(),
    )
    complete = run_request(app, path, BODIES[name], position)
    assert raw(complete)
    assert complete[-1]["more_body"] is False
    cuts = [index for index in range(len(complete)) if MARKS_KEY in complete[index]]
    assert cuts == list(range(len(complete)))
    for cut in {0, 1, 2, 3, len(complete) // 2, len(complete) - 3, len(complete) - 2} & set(
        range(len(complete) - 1)
    ):
        position_at_cut = copy.deepcopy(position)
        for message in complete[: cut + 1]:
            position_at_cut.advance(message[MARKS_KEY])
        resumed = run_request(app, path, BODIES[name], position_at_cut)
        assert sorted_by_answer(raw(complete[: cut + 1]) + raw(resumed)) == sorted_by_answer(
            raw(complete)
        ), cut


def test_a_resumed_call_keeps_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PendingAnswers, "has_unread_events", False)
    body = {"input": "x", "stream": True, "tools": [{"type": "function", "name": "weather"}]}
    runner = fake_runner(CALL, template=CHAT, n_ctx=1024, n_seq_max=4)
    with closing(EngineBridge(runner)) as bridge:
        app, position = make_app(bridge, ServerSettings(("tiny",), sampling=GREEDY)), new_position()
        complete = run_request(app, "/v1/responses", body, position)
        cut = next(
            index
            for index, entry in enumerate(complete)
            if b"arguments.delta" in entry.get("body", b"")
        )
        for message in complete[: cut + 1]:
            position.advance(message[MARKS_KEY])
        resumed = run_request(app, "/v1/responses", body, position)
    assert raw(complete[: cut + 1]) + raw(resumed) == raw(complete)
    assert len(set(re.findall(rb'"call_id":"(\w+)"', raw(complete)))) == 1


def test_each_answer_is_resumed_separately() -> None:
    """The resuming process may produce the answers' events in another order, and a prompt event
    that the first process had not produced.
    """
    time = TokenTime(65, "a", 0, 0, 0)
    token, end, prompt = (partial(Event, token=entry, text="") for entry in (time, None, None))
    first = [token(0), token(1), token(0), end(0, finish="stop"), token(1)]
    position = new_position()
    position.advance(stream_marks(first))
    past_answer = PastAnswer(position)
    assert past_answer.has_started
    repeated = [
        token(1),
        prompt(1),
        token(1),
        token(1),
        token(0),
        token(2),
        token(0),
        end(0, finish="stop"),
    ]
    assert [past_answer.includes(entry) for entry in repeated] == [
        True,
        False,
        True,
        False,
        True,
        False,
        True,
        True,
    ]
    assert not past_answer.includes(end(1, finish="stop"))


class PositionContext(FakeContext):
    """Logits depend only on the number of tokens before them."""

    def _logits(self, tokens: Any) -> Any:
        return np.random.default_rng(len(tokens)).normal(0, 2, N_VOCAB).astype(np.float32)


def sample_answers(*position: ReplayedAnswer) -> list[Answer]:
    """Sample an answer for each replay."""
    model = FakeModel()
    engine = Engine(PositionContext(n_seq_max=len(position)), model, None)
    sampling = default_sampling().with_values(
        {"temp": 1, "top_k": 0, "seed": 5, "xtc_probability": 0.5}
    )
    ids = engine.submit_samples(
        Request((65, 66), sampling, max_tokens=24, ignore_eos=True, replays=position), len(position)
    )
    while engine.is_busy:
        engine.step()
    return [engine.pop_answer(entry) for entry in ids]


def ids(answer: Answer) -> list[int]:
    return [token.id for token in answer.tokens]


def test_replayed_tokens_do_not_change_later_sampling() -> None:
    """After replayed tokens, the same tokens are sampled as without a replay."""
    (unreplayed,) = map(ids, sample_answers(NO_REPLAY))
    assert len(set(unreplayed)) > 8
    replayed = tuple(token ^ 1 for token in unreplayed[:9])
    assert list(map(ids, sample_answers(ReplayedAnswer(replayed)))) == [
        [*replayed, *unreplayed[9:]]
    ]


def test_each_sample_has_its_own_replay() -> None:
    """A sample whose replay has ended gets no more tokens."""
    unreplayed = sample_answers(NO_REPLAY, NO_REPLAY, NO_REPLAY, NO_REPLAY)
    assert ids(unreplayed[0]) != ids(unreplayed[1])
    position = [
        ReplayedAnswer(tuple(ids(entry)[:count]))
        for entry, count in zip(unreplayed, (0, 3, 7, 0), strict=True)
    ]
    position[2:] = ReplayedAnswer(position[2].tokens, "stop"), ReplayedAnswer((), "context_full")
    repeated = sample_answers(*position)
    assert list(map(ids, repeated)) == [
        ids(unreplayed[0]),
        ids(unreplayed[1]),
        ids(unreplayed[2])[:7],
        [],
    ]
    assert [entry.finish for entry in repeated] == ["length", "length", "stop", "context_full"]


def test_equal_prompts_of_a_request_get_different_seeds(app: Any) -> None:
    body = {
        **PROMPT_BODY,
        "prompt": ["x", "x"],
        "temperature": 10,
        "top_k": 0,
        "top_p": 1,
        "min_p": 0,
    }
    texts = ["", ""]
    for message in run_request(app, "/v1/completions", body, new_position()):
        for line in message.get("body", b"").splitlines():
            for choice in json.loads(line[6:])["choices"] if line.startswith(b"data: {") else ():
                texts[choice["index"]] += choice["text"]
    assert texts[0] != texts[1]
