"""Drafts that are trees: the same answers as plain decoding, the same cells, and the path of any rank
is kept.
"""

from typing import Any

import pytest

from llmcli.runtime.drafting.base import Draft, DraftState
from llmcli.runtime.drafting.gain.tree_shape import ShapeLimits, TreeShape, choose_shape
from llmcli.runtime.drafting.guesses.candidates import Candidates, fill_shape
from llmcli.runtime.drafting.ngram import PromptLookup
from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.requests.request import Answer, Request
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.strategies.base import Speculation
from llmcli.runtime.strategies.speculative import SpeculativeStrategy
from tests.fixtures.drafts import CHEAP, Knowing, Steady
from tests.fixtures.fakes import EOS, FakeContext, FakeModel

GREEDY = default_sampling().with_values({"temp": 0})
PROMPT = b"sing: "
VERSE = b"row, row, row your boat gently down the stream; merrily, life is but a dream"
CHANCES = (0.5, 0.3, 0.15)


class KnowingTree(Knowing):
    """A drafter that knows the answer, and has the right token at any rank."""

    extends_all = True

    def shape(self, limits: ShapeLimits) -> TreeShape:
        return choose_shape([CHANCES] * len(self._next()), limits, self.extends_all)

    def draft(self, shape: TreeShape) -> Draft:
        candidates = []
        for token in self._next():
            guesses = [(token + other) % 256 for other in range(len(CHANCES) + 1)]
            if self.random.random() > self.right:
                guesses = guesses[1:]  # all are wrong
            self.random.shuffle(guesses)
            candidates.append(Candidates(tuple(guesses[: len(CHANCES)])))
        found = fill_shape(shape, candidates)
        self.lengths.append(len(found.tree))
        return found


class KnowingComb(KnowingTree):
    """The same drafter with guesses only after the best ones."""

    extends_all = False


def by_position(tokens: list[int]) -> int:
    """Give the next token of the verse by the number of tokens so far."""
    at = len(tokens) - len(PROMPT)
    return VERSE[at] if at < len(VERSE) else EOS


def make_engine(*drafters: Any, n_ctx: int = 512, n_branches: int = 8, **fields: Any) -> Engine:
    context = FakeContext(n_ctx=n_ctx, reply=by_position, max_branches=n_branches, **fields)
    speculation = Speculation(drafters, Steady(CHEAP), 16, max_branches=n_branches)
    return Engine(context, FakeModel(), None, speculation)


def run(engine: Engine, strategy: str = "speculative", **fields: Any) -> Answer:
    """Return the answer to a request. After each step, exactly the cells of the ledger are used."""
    sampling = GREEDY.with_values(fields.pop("values", {}))
    number = engine.submit(Request(tuple(PROMPT), sampling, strategy=strategy, **fields))
    while engine.is_busy:
        engine.step()
        engine.ledger.check()
        assert engine.context.used == engine.ledger.used_cells
    return engine.pop_answer(number)


def contents(answer: Answer) -> tuple[object, ...]:
    return (
        answer.text,
        answer.finish,
        [(token.id, token.text, token.logprob) for token in answer.tokens],
    )


@pytest.mark.parametrize("kind", [KnowingTree, KnowingComb])
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(
    "values", [{}, {"temp": 1.2, "seed": 3, "min_p": 0, "repeat_penalty": 1.2}]
)
def test_the_answer_is_that_of_plain_decoding(
    kind: type[KnowingTree], right: float, values: dict[str, float]
) -> None:
    plain = run(make_engine(KnowingTree(VERSE)), "plain", logprobs=True, values=values)
    engine = make_engine(kind(VERSE, right))
    found = run(engine, logprobs=True, values=values)
    assert contents(found) == contents(plain)
    assert bool(found.n_accepted) == (right > 0)
    assert found.n_passes == len(found.tokens) - 1 - found.n_accepted + (found.finish == "stop")
    if right == 1 and not values:  # two in three guesses are not of rank 0
        assert found.n_accepted > len(VERSE) // 3


@pytest.mark.parametrize("n_branches", [1, 2, 3])
def test_a_tree_has_no_more_paths_than_the_context_allows(n_branches: int) -> None:
    assert run(make_engine(KnowingTree(VERSE), n_branches=n_branches)).text == VERSE.decode()


@pytest.mark.parametrize("number", range(1, 8))
def test_an_interrupted_pass_over_a_tree_is_repeated(number: int) -> None:
    assert run(make_engine(KnowingTree(VERSE, 0.8), abort_at=number)).text == VERSE.decode()


@pytest.mark.parametrize("n_ctx", range(18, 34))
def test_a_tree_fills_the_context_to_its_last_cell(n_ctx: int) -> None:
    plain = run(make_engine(KnowingTree(VERSE), n_ctx=n_ctx), "plain")
    found = run(make_engine(KnowingTree(VERSE, 0.8), n_ctx=n_ctx))
    assert contents(found) == contents(plain)
    assert found.finish == "context_full"


@pytest.mark.parametrize("limit", range(1, 8))
def test_the_answer_ends_in_the_middle_of_a_tree(limit: int) -> None:
    plain = run(make_engine(KnowingTree(VERSE)), "plain", max_tokens=limit)
    assert contents(run(make_engine(KnowingTree(VERSE)), max_tokens=limit)) == contents(plain)


def test_a_cancelled_answer_leaves_no_cells_of_branches() -> None:
    engine = make_engine(KnowingTree(VERSE))
    number = engine.submit(Request(tuple(PROMPT), GREEDY, strategy="speculative"))
    for _ in range(4):
        engine.step()
    engine.cancel(number)
    while engine.is_busy:
        engine.step()
    engine.ledger.check()
    found = engine.pop_answer(number)
    assert found.finish == "cancelled"
    assert VERSE.decode().startswith(found.text)
    assert engine.context.used == engine.ledger.used_cells


def test_an_answer_that_fails_in_a_tree_leaves_no_cells_of_branches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("cannot observe")

    monkeypatch.setattr(SpeculativeStrategy, "_keep_path", fail)
    engine = make_engine(KnowingTree(VERSE))
    assert isinstance(run(engine).error, ValueError)
    assert run(engine, "plain").text == VERSE.decode()


class Unsure(Knowing):
    """A drafter with a single wrong guess, which costs time."""

    def shape(self, limits: ShapeLimits) -> TreeShape:
        return super().shape(limits).shorten(1)

    def cost_seconds(self, n_depths: int) -> float:
        return 1e-6


class LateLookup(PromptLookup):
    """Prompt lookup that never drafts first."""

    def start(self, request: Request, seed: int) -> DraftState:
        drafts = super().start(request, seed)
        find_shape = drafts.shape

        def shape(limits: ShapeLimits) -> TreeShape:
            found = find_shape(limits)
            return TreeShape(
                found.ranks, found.parents, tuple(0.01 * chance for chance in found.chances)
            )

        drafts.shape = shape  # type: ignore[method-assign]
        return drafts


def test_free_guesses_of_other_drafters_use_the_room_of_the_pass() -> None:
    """Three rows cost as much as one guess. All guesses of the first drafter are wrong."""
    unsure = Unsure(VERSE * 2, right=0.0, chance=0.99)
    engine = make_engine(unsure, LateLookup())
    engine.context.speak = lambda tokens: (VERSE * 2)[len(tokens) - len(PROMPT)]
    found = run(engine, max_tokens=2 * len(VERSE) - 1)
    assert found.text == (VERSE * 2)[:-1].decode()
    counts = {one.method: one for one in found.drafts}
    assert counts["knowing"].n_right == 0 and counts["knowing"].n_drafts > 10
    assert counts["ngram"].n_right > 10
    assert found.n_accepted == counts["ngram"].n_right
    assert max(unsure.lengths) == 1 and max(engine.context.batches[1:]) == 4
