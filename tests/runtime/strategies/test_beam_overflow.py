"""Beams in a full context: all lose the same cells and continue correctly."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.requests.beam_settings import BeamSettings
from llmcli.runtime.requests.context_overflow import AttentionSinks, DropTurns, OverflowPolicy
from llmcli.runtime.requests.request import Answer, Request, RunOptions
from llmcli.runtime.runner import open_runner
from llmcli.runtime.sampling import default_sampling
from tests.fixtures.fakes import EOS, N_VOCAB, FakeContext, FakeModel
from tests.runtime.constraint.words import schema

TURNS = ["<first turn>" * 3, "<second turn>" * 3, "<third>"]
HEAD, ASKED = "be kind:", "what now?"


class Branching(FakeContext):
    """Each next letter has two that are nearly as likely, so that beams part early and stay apart."""

    def _logits(self, tokens: Any) -> np.ndarray:
        logits = np.full(N_VOCAB, -9.0, np.float32)
        last = tokens[-1] % 26
        for place, letter in enumerate(((last + 1) % 26, (last + 7) % 26, (last + 3) % 26)):
            logits[ord("a") + letter] = 5 - 0.3 * place - 0.01 * (sum(tokens[-3:]) % 7)
        logits[EOS] = -5
        return logits


def prompt(gone: int) -> list[int]:
    return list((HEAD + "".join(TURNS[gone:]) + ASKED).encode())


def search(
    overflow: OverflowPolicy | None,
    *,
    n_ctx: int = 160,
    beams: int = 3,
    tokens: int = 60,
    more: Callable[[Engine], None] = lambda engine: None,
    **context: Any,
) -> tuple[Answer, Engine]:
    model = FakeModel()
    made = Branching(n_ctx=n_ctx, n_seq_max=beams + 1, **context)
    engine = Engine(made, model, None)
    one = engine.submit(
        Request(
            tuple(prompt(0)),
            default_sampling(),
            tokens,
            strategy="beam",
            search=BeamSettings(beams, 0.0),
            overflow=overflow,
            ignore_eos=True,
        )
    )
    for _ in range(3000):
        if not engine.is_busy:
            break
        engine.step()
        engine.ledger.check()
        assert made.used <= n_ctx
        more(engine)
    assert engine.ledger.n_idle == beams + 1
    return engine.pop_answer(one), engine


@pytest.mark.parametrize("moves", [True, False], ids=["moved", "computed anew"])
@pytest.mark.parametrize(("beams", "n_ctx"), [(2, 150), (3, 160), (5, 220)])
def test_turns_leave_and_the_answers_are_those_of_a_context_that_holds_all(
    beams: int, n_ctx: int, moves: bool
) -> None:
    roomy, _ = search(None, n_ctx=2000, beams=beams)
    shift = DropTurns(len(TURNS), prompt, moves)
    answer, engine = search(shift, beams=beams, n_ctx=n_ctx, can_shift=moves)
    assert answer.finish == "length"
    assert answer.overflow_stats.turns >= 1 and answer.overflow_stats.tokens >= len(TURNS[0])
    # This model looks at the last tokens alone: what has left changes nothing.
    assert [beam.tokens for beam in answer.beams] == [beam.tokens for beam in roomy.beams]
    assert [beam.score for beam in answer.beams] == pytest.approx(
        [beam.score for beam in roomy.beams]
    )
    held = max(engine.ledger.tokens, key=len)
    assert held[: len(prompt(answer.overflow_stats.turns))] == prompt(answer.overflow_stats.turns)
    again = engine.submit(
        Request(
            (*prompt(answer.overflow_stats.turns), *answer.beams[0].tokens, 33),
            default_sampling(),
            1,
        )
    )
    while engine.is_busy:
        engine.step()
    assert engine.pop_answer(again).cached_tokens > len(prompt(answer.overflow_stats.turns))


@pytest.mark.parametrize("moves", [True, False], ids=["moved", "computed anew"])
def test_a_window_moves_on_under_all_beams(moves: bool) -> None:
    roomy, _ = search(None, n_ctx=4000, tokens=300)
    answer, engine = search(AttentionSinks(4), tokens=300, can_shift=moves)
    assert (answer.finish, len(answer.tokens)) == ("length", 300)
    assert answer.overflow_stats.times > 2 and answer.overflow_stats.turns == 0
    whole = [*prompt(0), *answer.beams[0].tokens]
    held = max(engine.ledger.tokens, key=len)
    assert held[:4] == whole[:4] and bytes(held[4:]) in bytes(whole[4:]) and len(held) > 40
    assert [beam.tokens for beam in answer.beams] == [beam.tokens for beam in roomy.beams]


def test_where_nothing_may_leave_the_best_so_far_is_told() -> None:
    answer, _ = search(DropTurns(0, prompt), tokens=300)
    assert answer.finish == "context_full"
    assert len(answer.beams) == 3 and answer.overflow_stats.times == 0
    full, _ = search(None, tokens=300)
    assert [beam.tokens for beam in full.beams] == [beam.tokens for beam in answer.beams]


@pytest.mark.parametrize("number", [25, 60, 61, 62, 63, 64, 70])
def test_a_pass_that_is_interrupted_within_changes_nothing(number: int) -> None:
    told = []
    for abort_at in (-1, number):
        answer, _ = search(
            AttentionSinks(4), tokens=120, n_ctx=120, can_shift=False, abort_at=abort_at
        )
        told.append(([beam.tokens for beam in answer.beams], answer.overflow_stats.tokens))
    assert told[0] == told[1]


def test_it_can_be_cancelled_at_every_step() -> None:
    for at in range(20, 60, 3):
        steps = iter(range(1000))

        def cancel(engine: Engine, at: int = at, steps: Any = steps) -> None:
            if next(steps) == at:
                engine.cancel(1)

        answer, _ = search(AttentionSinks(4), n_ctx=110, tokens=90, can_shift=False, more=cancel)
        assert answer.finish == "cancelled" and len(answer.beams) == 3


def test_another_answer_beside_it_keeps_its_cells() -> None:
    model, context = FakeModel(), Branching(n_ctx=300, n_seq_max=4)
    engine = Engine(context, model, None)
    greedy = default_sampling().with_values({"temp": 0})
    other = engine.submit(Request(tuple(b"beside"), greedy, 60, ignore_eos=True))
    one = engine.submit(
        Request(
            tuple(prompt(0)),
            default_sampling(),
            150,
            strategy="beam",
            search=BeamSettings(3),
            overflow=AttentionSinks(4),
            ignore_eos=True,
        )
    )
    while engine.is_busy:
        engine.step()
        engine.ledger.check()
    answer, beside = engine.pop_answer(one), engine.pop_answer(other)
    assert (answer.finish, len(answer.tokens), len(beside.tokens)) == ("length", 150, 60)
    assert answer.overflow_stats.times > 0


def test_documents_are_finished_over_a_full_context() -> None:
    grammar = schema(
        {"type": "array", "items": {"enum": ["one", "another"]}, "minItems": 9, "maxItems": 9}
    )
    model = FakeModel()
    engine = Engine(
        FakeContext(n_ctx=90, n_seq_max=3),
        model,
        None,
    )
    one = engine.submit(
        Request(
            tuple(b"ask"),
            default_sampling(),
            strategy="beam",
            search=BeamSettings(3),
            overflow=AttentionSinks(4),
            grammar=grammar,
        )
    )
    while engine.is_busy:
        engine.step()
        engine.ledger.check()
    answer = engine.pop_answer(one)
    assert answer.overflow_stats.times > 0 and answer.finish == "stop"
    assert [beam.is_complete for beam in answer.beams] == [True] * 3


@pytest.mark.parametrize("moves", [True, False], ids=["moved", "computed anew"])
def test_a_real_cache_follows(moves: bool, stories_gguf: Path) -> None:
    options = RunOptions(ctx_size=256, threads=1, batch_size=64)
    with open_runner(stories_gguf, options, raw=True, slots=4) as runner:
        runner.context.can_shift = moves
        asked = Request(
            runner.encode_text("Once upon a time there was a little dog. " * 4),
            default_sampling(),
            200,
            ignore_eos=True,
            strategy="beam",
            search=BeamSettings(4),
            overflow=AttentionSinks(5),
            can_move_cells=True,
        )
        reply = runner.reply(asked)
        for _ in reply:
            runner.engine.ledger.check()
        answer = reply.answer
        assert (answer.finish, len(answer.tokens), len(answer.beams)) == ("length", 200, 4)
        assert answer.overflow_stats.times > 0
        runner.engine.ledger.check()


def test_an_answer_that_only_repeats_itself_ends() -> None:
    model, context = (
        FakeModel(),
        FakeContext(n_ctx=200, n_seq_max=2, reply=lambda tokens: ord("a") + len(tokens) % 3),
    )
    engine = Engine(context, model, None)
    one = engine.submit(
        Request(
            tuple(b"go"),
            default_sampling(),
            strategy="beam",
            search=BeamSettings(2),
            overflow=AttentionSinks(4),
        )
    )
    while engine.is_busy:
        engine.step()
    answer = engine.pop_answer(one)
    assert answer.finish == "repetition" and len(answer.tokens) > 2000
