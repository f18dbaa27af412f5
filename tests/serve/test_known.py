"""A stream that was cut anywhere goes on in another process's words as if nothing had happened."""

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from llmcli.runtime.engine import Engine
from llmcli.runtime.request import Request
from llmcli.runtime.sampling import defaults
from llmcli.runtime.strategies.base import Vocabulary
from llmcli.serve import registry
from llmcli.serve.app import make_app
from llmcli.serve.bridge import Answering, Bridge
from llmcli.serve.known import TOLD, Known, fresh
from llmcli.serve.settings import Settings
from tests.fakes import N_VOCAB, FakeContext, FakeModel, fake_runner
from tests.serve.conftest import CHAT, GREEDY

CALLED = b'<tool_call>\n{"name": "weather", "arguments": {"day": "today"}}\n</tool_call>'
SAID = "<think>so</think>Grüße, 12 \U0001f600 times."
LIMIT = {"max_tokens": 60, "stream": True}
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], **LIMIT}
TEXT = {"prompt": "x", **LIMIT}
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
BODIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(registry.forms().keys() - {"/infill"}, ASKED),
    "/v1/completions": TEXT, "/completion": TEXT, "/api/generate": TEXT,
    "/v1/responses": {"input": "x", "stream": True},
    "logprobs": {**ASKED, "logprobs": True, "top_logprobs": 2}, "stop": {**ASKED, "stop": ["12", "nowhere"]},
    "beams": {**ASKED, "beams": 2}, "tools": {**ASKED, "tools": TOOLS},
}  # fmt: skip
# What is of one answer and not of one text.
OWN = re.compile(
    rb'"(\w+_duration|created_at|completed_at|timings|tokens_cached|cached_tokens|cache_read_input_tokens|input_tokens)":'
    rb'("[^"]*"|\{[^}]*\}|[\d.e-]+|null)'
)


@pytest.fixture(scope="module")
def app() -> Iterator[Any]:
    runner = fake_runner(SAID.encode(), template=CHAT, n_ctx=1024, n_seq_max=4)
    with closing(Bridge(runner)) as bridge:
        yield make_app(bridge, Settings(("tiny",), sampling=GREEDY))


def streamed(app: Any, path: str, body: dict[str, Any], known: Known) -> list[Any]:
    """The messages of an answer of which so much is known."""
    sent: list[Any] = []
    parts = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Any:
        return parts.pop() if parts else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "client": None}
    asyncio.run(app(known.put(scope), receive, send))
    assert sent[0]["status"] == 200, sent[1]
    return sent


def raw(sent: list[Any]) -> bytes:
    return OWN.sub(b"", b"".join(one.get("body", b"") for one in sent))


@pytest.mark.parametrize("name", sorted(BODIES))
def test_what_another_goes_on_with_is_the_rest(app: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answering, "waiting", False)  # each event by itself
    path, known = name if name.startswith("/") else "/v1/chat/completions", fresh()
    whole = streamed(app, path, BODIES[name], known)
    assert raw(whole)
    assert whole[-1]["more_body"] is False
    cuts = [at for at in range(len(whole)) if TOLD in whole[at]]
    assert cuts == list(range(len(whole)))
    for cut in {0, 1, 2, len(whole) // 2, len(whole) - 2} & set(range(len(whole) - 1)):
        so_far = known
        for message in whole[: cut + 1]:
            so_far = so_far.more(*message[TOLD])
        rest = streamed(app, path, BODIES[name], so_far)
        assert raw(whole[: cut + 1]) + raw(rest) == raw(whole), cut


def test_a_call_keeps_its_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answering, "waiting", False)
    body = {"input": "x", "stream": True, "tools": [{"type": "function", "name": "weather"}]}
    runner = fake_runner(CALLED, template=CHAT, n_ctx=1024, n_seq_max=4)
    with closing(Bridge(runner)) as bridge:
        app, known = make_app(bridge, Settings(("tiny",), sampling=GREEDY)), fresh()
        whole = streamed(app, "/v1/responses", body, known)
        cut = next(at for at, one in enumerate(whole) if b"arguments.delta" in one.get("body", b""))
        for message in whole[: cut + 1]:
            known = known.more(*message[TOLD])
        rest = streamed(app, "/v1/responses", body, known)
    assert raw(whole[: cut + 1]) + raw(rest) == raw(whole)
    assert len(set(re.findall(rb'"call_id":"(\w+)"', raw(whole)))) == 1


def test_of_several_answers_nothing_is_known(app: Any) -> None:
    assert not any(TOLD in one for one in streamed(app, "/v1/completions", {**TEXT, "n": 2}, fresh()))


def test_known_tokens_leave_the_chances_where_they_were() -> None:
    """Logits depend on the place alone here: what is drawn behind known tokens is what was drawn without them."""

    class Places(FakeContext):
        def _logits(self, tokens: Any) -> Any:
            return np.random.default_rng(len(tokens)).normal(0, 2, N_VOCAB).astype(np.float32)

    def drawn(known: tuple[int, ...]) -> list[int]:
        model = FakeModel()
        machine = Engine(Places(), Vocabulary(model.piece, model.ends, N_VOCAB), None)
        sampling = defaults().with_values({"temp": 1, "top_k": 0, "seed": 5, "xtc_probability": 0.5})
        one = machine.submit(Request((65, 66), sampling, max_tokens=24, ignore_eos=True, known=known))
        while machine.busy:
            machine.step()
        return [token.id for token in machine.answer(one).tokens]

    alone = drawn(())
    assert len(set(alone)) > 8
    others = tuple(token ^ 1 for token in alone[:9])
    assert drawn(others) == [*others, *alone[9:]]
