"""Lookahead decoding: guesses are the model's own predictions, and the answer is that of plain
decoding.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.drafting.base import DrafterResources
from llmcli.runtime.drafting.lookahead import LookaheadDrafter
from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.requests.request import Answer, Request
from llmcli.runtime.sampling import Sampling, default_sampling
from llmcli.runtime.strategies.base import Speculation
from tests.fixtures.drafts import CHEAP, Steady
from tests.fixtures.fakes import EOS, N_VOCAB, FakeContext, FakeModel

GREEDY = default_sampling().with_values({"temp": 0})
CYCLE = b"abcdefghij"


def alphabet(tokens: list[int]) -> int:
    """Predict the next letter of a cycle by the last letter only, as a model with a short memory."""
    if len(tokens) > 120:
        return EOS
    return CYCLE[(CYCLE.index(tokens[-1]) + 1) % len(CYCLE)] if tokens[-1] in CYCLE else CYCLE[0]


def make_engine(is_drafting: bool, context: FakeContext) -> tuple[Engine, FakeContext]:
    drafter = LookaheadDrafter.create(DrafterResources(FakeModel(), uses_lookahead=True))
    assert drafter is not None
    speculation = Speculation((drafter,), Steady(CHEAP), 16)
    return Engine(context, FakeModel(), None, speculation if is_drafting else None), context


def ask(engine: Engine, sampling: Sampling, count: int | None = None) -> Answer:
    number = engine.submit(
        Request(tuple(b"start"), sampling, count, strategy="speculative", allow_repetition=True)
    )
    while engine.is_busy:
        engine.step()
        engine.ledger.check()
    return engine.pop_answer(number)


def test_predictions_after_wrong_guesses_are_the_next_guesses() -> None:
    plain_engine, plain_context = make_engine(False, FakeContext(n_ctx=512, reply=alphabet))
    engine, context = make_engine(True, FakeContext(n_ctx=512, reply=alphabet))
    expected, found = ask(plain_engine, GREEDY), ask(engine, GREEDY)
    assert found.text == expected.text
    assert found.n_accepted > 50
    assert len(context.batches) < len(plain_context.batches) / 2


def test_the_method_is_used_only_on_request() -> None:
    assert LookaheadDrafter.create(DrafterResources(FakeModel(), uses_ngrams=True)) is None


class EvenContext(FakeContext):
    """A context of a model that hesitates between several letters after each."""

    def _logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        logits = np.full(N_VOCAB, -20, np.float32)
        at = CYCLE.index(tokens[-1]) if tokens[-1] in CYCLE else 0
        for step in range(1, 5):
            logits[CYCLE[(at + step) % len(CYCLE)]] = 3 - 0.5 * step
        return logits


def test_drafts_do_not_change_the_tokens_that_a_seed_draws() -> None:
    """Guesses are only compared with draws. Half of the draws are not the likeliest token."""
    texts: dict[bool, list[str]] = {False: [], True: []}
    n_accepted = 0
    for is_drafting, found in texts.items():
        engine, _ = make_engine(is_drafting, EvenContext(n_ctx=512))
        for seed in range(4):
            sampling = default_sampling().with_values({"temp": 1.5, "seed": seed, "min_p": 0})
            answer = ask(engine, sampling, 60)
            found.append(answer.text)
            assert bool(answer.n_drafted) == is_drafting
            n_accepted += answer.n_accepted
    assert texts[False] == texts[True]
    assert len(set(texts[True])) == 4
    assert n_accepted > 20
