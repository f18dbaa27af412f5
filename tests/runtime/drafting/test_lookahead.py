"""Lookahead decoding: guesses are the model's own predictions, and the answer is that of plain
decoding.
"""

import pytest

from llmcli.runtime.drafting.base import DrafterResources
from llmcli.runtime.drafting.lookahead import LookaheadDrafter
from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.requests.request import Answer, Request
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.strategies.base import Speculation
from tests.fixtures.drafts import CHEAP, Steady
from tests.fixtures.fakes import EOS, FakeContext, FakeModel

GREEDY = default_sampling().with_values({"temp": 0})
CYCLE = b"abcdefghij"


def alphabet(tokens: list[int]) -> int:
    """Predict the next letter of a cycle by the last letter only, as a model with a short memory."""
    if len(tokens) > 120:
        return EOS
    return CYCLE[(CYCLE.index(tokens[-1]) + 1) % len(CYCLE)] if tokens[-1] in CYCLE else CYCLE[0]


def make_engine(is_drafting: bool) -> tuple[Engine, FakeContext]:
    context = FakeContext(n_ctx=512, reply=alphabet)
    drafter = LookaheadDrafter.create(DrafterResources(FakeModel(), uses_lookahead=True))
    assert drafter is not None
    speculation = Speculation((drafter,), Steady(CHEAP), 16)
    return Engine(context, FakeModel(), None, speculation if is_drafting else None), context


def answer(engine: Engine) -> Answer:
    number = engine.submit(
        Request(tuple(b"start"), GREEDY, strategy="speculative", allow_repetition=True)
    )
    while engine.is_busy:
        engine.step()
        engine.ledger.check()
    return engine.pop_answer(number)


def test_predictions_after_wrong_guesses_are_the_next_guesses() -> None:
    plain_engine, plain_context = make_engine(False)
    engine, context = make_engine(True)
    expected, found = answer(plain_engine), answer(engine)
    assert found.text == expected.text
    assert found.n_accepted > 50
    assert len(context.batches) < len(plain_context.batches) / 2


def test_the_method_is_used_only_on_request() -> None:
    assert LookaheadDrafter.create(DrafterResources(FakeModel(), uses_ngrams=True)) is None


@pytest.mark.parametrize("seed", [1, 2])
def test_the_distribution_of_sampled_answers_is_unchanged(seed: int) -> None:
    """The same seed draws the same tokens, because guesses are only compared with draws."""
    sampling = default_sampling().with_values({"temp": 1.5, "seed": seed})
    texts = []
    for is_drafting in (False, True):
        engine, _ = make_engine(is_drafting)
        number = engine.submit(
            Request(tuple(b"start"), sampling, 60, strategy="speculative", allow_repetition=True)
        )
        while engine.is_busy:
            engine.step()
        texts.append(engine.pop_answer(number).text)
    assert texts[0] == texts[1]
