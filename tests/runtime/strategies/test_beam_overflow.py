"""Beam search in a full context: the same tokens are dropped from all beams, which then continue as
in a longer context.
"""

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
SYSTEM, QUESTION = "be kind:", "what now?"


class Branching(FakeContext):
    """A context with three nearly equally likely letters at each position, so that the beams soon
    have different texts.
    """

    def _logits(self, tokens: Any) -> np.ndarray:
        logits = np.full(N_VOCAB, -9.0, np.float32)
        last = tokens[-1] % 26
        for rank, letter in enumerate(((last + 1) % 26, (last + 7) % 26, (last + 3) % 26)):
            logits[ord("a") + letter] = 5 - 0.3 * rank - 0.01 * (sum(tokens[-3:]) % 7)
        logits[EOS] = -5
        return logits


def prompt(n_dropped: int) -> list[int]:
    """Return the tokens of the prompt without its first `n_dropped` turns."""
    return list((SYSTEM + "".join(TURNS[n_dropped:]) + QUESTION).encode())


def search(
    overflow: OverflowPolicy | None,
    *,
    n_ctx: int = 160,
    beams: int = 3,
    tokens: int = 60,
    after_step: Callable[[Engine], None] = lambda engine: None,
    **context: Any,
) -> tuple[Answer, Engine]:
    """Run a beam search over a conversation of several turns. Return the answer and the engine.
    `after_step` is called after each step; `context`: settings of the fake context.
    """
    model = FakeModel()
    fake_context = Branching(n_ctx=n_ctx, n_seq_max=beams + 1, **context)
    engine = Engine(fake_context, model, None)
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
        assert fake_context.used <= n_ctx
        after_step(engine)
    assert engine.ledger.n_idle == beams + 1
    return engine.pop_answer(one), engine


@pytest.mark.parametrize("can_move", [True, False], ids=["moved", "recomputed"])
@pytest.mark.parametrize(("beams", "n_ctx"), [(2, 150), (3, 160), (5, 220)])
def test_dropped_turns_do_not_change_the_answers(beams: int, n_ctx: int, can_move: bool) -> None:
    unlimited, _ = search(None, n_ctx=2000, beams=beams)
    shift = DropTurns(len(TURNS), prompt, can_move)
    answer, engine = search(shift, beams=beams, n_ctx=n_ctx, can_shift=can_move)
    assert answer.finish == "length"
    assert answer.overflow_stats.turns >= 1 and answer.overflow_stats.tokens >= len(TURNS[0])
    # the logits depend only on the last tokens, so dropped tokens do not change the answers
    assert [beam.tokens for beam in answer.beams] == [beam.tokens for beam in unlimited.beams]
    assert [beam.score for beam in answer.beams] == pytest.approx(
        [beam.score for beam in unlimited.beams]
    )
    cached = max(engine.ledger.tokens, key=len)
    assert cached[: len(prompt(answer.overflow_stats.turns))] == prompt(answer.overflow_stats.turns)
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


@pytest.mark.parametrize("can_move", [True, False], ids=["moved", "recomputed"])
def test_attention_sinks_drop_the_same_tokens_from_all_beams(can_move: bool) -> None:
    unlimited, _ = search(None, n_ctx=4000, tokens=300)
    answer, engine = search(AttentionSinks(4), tokens=300, can_shift=can_move)
    assert (answer.finish, len(answer.tokens)) == ("length", 300)
    assert answer.overflow_stats.times > 2 and answer.overflow_stats.turns == 0
    all_tokens = [*prompt(0), *answer.beams[0].tokens]
    cached = max(engine.ledger.tokens, key=len)
    assert cached[:4] == all_tokens[:4] and bytes(cached[4:]) in bytes(all_tokens[4:])
    assert len(cached) > 40
    assert [beam.tokens for beam in answer.beams] == [beam.tokens for beam in unlimited.beams]


def test_full_context_ends_the_search_if_no_tokens_may_be_dropped() -> None:
    answer, _ = search(DropTurns(0, prompt), tokens=300)
    assert answer.finish == "context_full"
    assert len(answer.beams) == 3 and answer.overflow_stats.times == 0
    full, _ = search(None, tokens=300)
    assert [beam.tokens for beam in full.beams] == [beam.tokens for beam in answer.beams]


@pytest.mark.parametrize("number", [25, 60, 61, 62, 63, 64, 70])
def test_interrupted_pass_of_the_rebuild_is_repeated_without_effect(number: int) -> None:
    results = []
    for abort_at in (-1, number):
        answer, _ = search(
            AttentionSinks(4), tokens=120, n_ctx=120, can_shift=False, abort_at=abort_at
        )
        results.append(([beam.tokens for beam in answer.beams], answer.overflow_stats.tokens))
    assert results[0] == results[1]


def test_search_can_be_cancelled_at_every_step() -> None:
    for at in range(20, 60, 3):
        steps = iter(range(1000))

        def cancel(engine: Engine, at: int = at, steps: Any = steps) -> None:
            if next(steps) == at:
                engine.cancel(1)

        answer, _ = search(
            AttentionSinks(4), n_ctx=110, tokens=90, can_shift=False, after_step=cancel
        )
        assert answer.finish == "cancelled" and len(answer.beams) == 3


def test_another_answer_keeps_its_cells() -> None:
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
    answer, other_answer = engine.pop_answer(one), engine.pop_answer(other)
    assert (answer.finish, len(answer.tokens), len(other_answer.tokens)) == ("length", 150, 60)
    assert answer.overflow_stats.times > 0


def test_documents_are_completed_in_a_full_context() -> None:
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


@pytest.mark.parametrize("can_move", [True, False], ids=["moved", "recomputed"])
def test_beams_of_a_real_model_continue_in_a_full_context(
    can_move: bool, stories_gguf: Path
) -> None:
    options = RunOptions(ctx_size=256, threads=1, batch_size=64)
    with open_runner(stories_gguf, options, raw=True, slots=4) as runner:
        runner.context.can_shift = can_move
        request = Request(
            runner.encode_text("Once upon a time there was a little dog. " * 4),
            default_sampling(),
            200,
            ignore_eos=True,
            strategy="beam",
            search=BeamSettings(4),
            overflow=AttentionSinks(5),
            can_move_cells=True,
        )
        reply = runner.reply(request)
        for _ in reply:
            runner.engine.ledger.check()
        answer = reply.answer
        assert (answer.finish, len(answer.tokens), len(answer.beams)) == ("length", 200, 4)
        assert answer.overflow_stats.times > 0
        runner.engine.ledger.check()


def test_search_ends_if_the_best_answer_only_repeats_itself() -> None:
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
