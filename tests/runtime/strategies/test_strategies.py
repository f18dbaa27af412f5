"""What every decoding strategy must do: greedy answers are those of plain decoding."""

import pytest

from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.requests.request import Request
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.strategies import strategies
from tests.fixtures.fakes import FakeContext, FakeModel

GREEDY = default_sampling().with_values({"temp": 0})


@pytest.mark.parametrize("name", sorted(strategies()))
@pytest.mark.parametrize(
    "fields", [{}, {"max_tokens": 4}, {"stops": ("lo w",)}, {"ignore_eos": True, "max_tokens": 30}]
)
def test_greedy_answer_is_that_of_plain_decoding(name: str, fields: dict) -> None:
    results = []
    for strategy in ("plain", name):
        model, context = FakeModel(), FakeContext(reply=b"hello world", n_seq_max=4)
        engine = Engine(context, model, None)
        one = engine.submit(Request(tuple(b"ask"), GREEDY, strategy=strategy, **fields))
        while engine.is_busy:
            engine.step()
            engine.ledger.check()
        answer = engine.pop_answer(one)
        results.append((answer.text, answer.finish, [token.id for token in answer.tokens]))
    assert results[0] == results[1]
    assert results[0][0]
