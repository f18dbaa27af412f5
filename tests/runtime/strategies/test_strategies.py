"""The contract of every strategy."""

import pytest

from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.requests.request import Request
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.strategies import strategies
from tests.fixtures.fakes import FakeContext, FakeModel

GREEDY = default_sampling().with_values({"temp": 0})


@pytest.mark.parametrize("name", sorted(strategies()))
@pytest.mark.parametrize(
    "more", [{}, {"max_tokens": 4}, {"stops": ("lo w",)}, {"ignore_eos": True, "max_tokens": 30}]
)
def test_greedily_each_says_what_plain_decoding_says(name: str, more: dict) -> None:
    told = []
    for strategy in ("plain", name):
        model, context = FakeModel(), FakeContext(reply=b"hello world", n_seq_max=4)
        engine = Engine(context, model, None)
        one = engine.submit(Request(tuple(b"ask"), GREEDY, strategy=strategy, **more))
        while engine.is_busy:
            engine.step()
            engine.ledger.check()
        answer = engine.pop_answer(one)
        told.append((answer.text, answer.finish, [token.id for token in answer.tokens]))
    assert told[0] == told[1]
    assert told[0][0]
