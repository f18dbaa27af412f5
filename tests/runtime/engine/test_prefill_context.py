"""Prompts read in a separate context: the moved cells equal those computed in place."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmcli.errors import UserError
from llmcli.runtime.binding import sequence_state
from llmcli.runtime.binding.batch import BatchRows
from llmcli.runtime.binding.context import Context
from llmcli.runtime.binding.logits_row import LogitsRow
from llmcli.runtime.binding.state_slicing import extract_sequence, transpose_values
from llmcli.runtime.engine.prefill_context import MIN_ROWS, PrefillContext
from llmcli.runtime.engine.schedule import Schedule
from llmcli.runtime.requests.request import Answer, Request, RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import default_sampling

HOME = RunOptions(
    ctx_size=1024, threads=1, flash_attn="off", cache_type_k="f32", cache_type_v="f32"
)
SERVED = Schedule(max_running=3, max_gap_seconds=0.5, max_idle_cells=0, min_prefill_rows=MIN_ROWS)
CLOSE = 1e-6  # of the squares of logits: the two ways of attention add up otherwise


def words(count: int, seed: int = 1) -> list[int]:
    picked = random.Random(seed)
    return [picked.randrange(3, 500) for _ in range(count)]


@pytest.fixture
def runner(stories_gguf: Path) -> Iterator[Runner]:
    with open_runner(stories_gguf, replace(HOME, prefill_cells=512), slots=4) as made:
        made.engine.schedule = SERVED
        yield made


def reader(runner: Runner) -> PrefillContext:
    assert isinstance(runner.engine.prefill_reader, PrefillContext)
    return runner.engine.prefill_reader


def watched(runner: Runner) -> list[int]:
    """The rows of each pass that it will have read."""
    read: list[int] = []
    context = reader(runner).context
    inner = context.decode

    def decode(rows: BatchRows) -> list[LogitsRow]:
        read.append(len(rows))
        return inner(rows)

    context.decode = decode  # type: ignore[method-assign]
    return read


def fill(context: Context, slot: int, tokens: Sequence[int], start: int = 0) -> None:
    end = start + len(tokens)
    context.decode(
        BatchRows(
            list(tokens), list(range(start, end)), [slot] * len(tokens), [False] * len(tokens)
        )
    )


def after(context: Context, slot: int, at: int) -> np.ndarray:
    """The logits behind a token that follows what a slot holds."""
    return context.decode(BatchRows([7], [at], [slot], [True]))[0].logits.copy()


def apart(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.square(one - other).sum() / np.square(other).sum())


def request(tokens: Sequence[int], most: int = 4) -> Request:
    sampling = default_sampling().with_values({"temp": 0})
    return Request(tuple(tokens), sampling, most, ignore_eos=True, logprobs=True, top_logprobs=5)


def answered(runner: Runner, *requests: Request) -> list[Answer]:
    engine = runner.engine
    ids = [engine.submit(one) for one in requests]
    while engine.is_busy:
        engine.step()
    engine.check()
    return [engine.pop_answer(one) for one in ids]


def first_logprobs(answer: Answer) -> dict[int, float]:
    return {one.token: one.logprob for one in answer.top_logprobs[0]}


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_what_came_home_goes_on_as_if_computed_there(stories_gguf: Path, kind: str) -> None:
    text = words(100)
    options = replace(HOME, prefill_cells=512, cache_type_k=kind, cache_type_v=kind)
    with open_runner(stories_gguf, options, slots=4) as runner:
        home, away = runner.context, reader(runner).context
        fill(home, 0, text)
        wanted = after(home, 0, 100)
        fill(away, 1, text)
        assert home.append_state(1, transpose_values(away.read_state(1)), 0)
        assert apart(after(home, 1, 100), wanted) < (CLOSE if kind == "f32" else 1e-3)
        assert away.write_state(2, transpose_values(home.read_state(1)))
        assert away.trim(2, 100)
        assert apart(after(away, 2, 100), wanted) < (CLOSE if kind == "f32" else 1e-3)


def test_the_end_alone_comes_home_behind_a_beginning_that_is_shared(runner: Runner) -> None:
    text, home, away = words(100), runner.context, reader(runner).context
    fill(home, 0, text)
    wanted = after(home, 0, 100)
    assert home.trim(0, 60)
    home.copy(0, 1, 0, 60)
    fill(away, 1, text)
    assert home.append_state(1, transpose_values(away.read_state(1), 60), 60)
    assert (home.first_position(1), home.last_position(1), home.last_position(0)) == (0, 99, 59)
    assert apart(after(home, 1, 100), wanted) < CLOSE
    assert home.trim(0, 0), "the beginning is the other's, too"
    assert apart(after_again(home, 1), wanted) < CLOSE


def after_again(context: Context, slot: int) -> np.ndarray:
    assert context.trim(slot, 100)
    return after(context, slot, 100)


def test_turned_twice_is_the_same_to_the_byte(runner: Runner) -> None:
    fill(runner.context, 0, words(50))
    held = runner.context.read_state(0)
    assert (
        bytes(transpose_values(transpose_values(held)))
        == bytes(held)
        != bytes(transpose_values(held))
    )


@pytest.mark.parametrize("flash", ["on", "off"])
def test_a_text_cut_out_of_the_whole_pool_is_what_llama_cpp_gives_of_it(
    stories_gguf: Path, flash: str
) -> None:
    """Cells drawn in turn, a beginning that several hold, a hole, and one that ends early."""
    with open_runner(
        stories_gguf, replace(HOME, flash_attn=flash, cache_type_v="f16"), slots=4
    ) as runner:
        home = runner.context
        fill(home, 0, words(30))
        home.copy(0, 1, 0, 20)
        fill(home, 1, words(10, 2), 20)
        fill(home, 2, words(25, 3))
        for turn in range(5):
            at = [30 + turn, 30 + turn, 25 + turn]
            home.decode(BatchRows([5, 6, 7], at, [0, 1, 2], [False] * 3))
        assert home.trim(2, 27)
        for slot in (0, 1, 2):
            own = sequence_state.read_state(home.pointer, slot)
            assert bytes(sequence_state.read_state(home.pointer, slot, is_scattered=True)) == bytes(
                own
            )


def test_what_lies_scattered_is_read_with_the_whole_pool(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken_apart: list[int] = []

    def counted(pool: memoryview, sequence: int) -> memoryview:
        taken_apart.append(sequence)
        return extract_sequence(pool, sequence)

    monkeypatch.setattr(sequence_state, "extract_sequence", counted)
    fill(runner.context, 0, words(30))
    fill(runner.context, 1, words(30))
    alone = bytes(runner.context.read_state(0))
    assert not taken_apart
    for at in range(30, 40):
        runner.context.decode(BatchRows([5, 6], [at, at], [0, 1], [False] * 2))
    mixed = runner.context.read_state(0)
    assert taken_apart == [0]
    assert len(mixed) > len(alone)
    assert runner.context.write_state(2, mixed)
    assert apart(after(runner.context, 2, 40), after(runner.context, 0, 40)) < CLOSE


def test_without_room_at_home_a_sequence_keeps_what_it_held(stories_gguf: Path) -> None:
    with open_runner(
        stories_gguf, replace(HOME, ctx_size=256, prefill_cells=256), slots=2
    ) as runner:
        home, away = runner.context, reader(runner).context
        fill(home, 0, words(200, 2))
        fill(home, 1, words(20))
        wanted = after(home, 1, 20)
        assert home.trim(1, 20)
        fill(away, 1, words(100))
        assert not home.append_state(1, transpose_values(away.read_state(1), 20), 20)
        assert apart(after(home, 1, 20), wanted) < CLOSE


def test_answers_are_those_of_a_context_that_reads_itself(
    runner: Runner, stories_gguf: Path
) -> None:
    """Long prompts, short ones, one that begins like another, one that goes on behind what is
    cached.
    """
    same = words(150)
    prompts = [same, same[:130] + words(10, 3), words(20, 4), words(300, 5), same + words(60, 6)]
    read, engine = watched(runner), runner.engine
    found = answered(runner, *map(request, prompts[:3])) + answered(
        runner, *map(request, prompts[3:])
    )
    with open_runner(stories_gguf, HOME, slots=4) as plain:
        wanted = [answered(plain, request(prompt))[0] for prompt in prompts]
    for one, other in zip(found, wanted, strict=True):
        mine, theirs = first_logprobs(one), first_logprobs(other)
        both = mine.keys() & theirs.keys()
        assert len(both) >= 3 and all(abs(mine[token] - theirs[token]) < 0.01 for token in both)
    assert read and min(read) >= MIN_ROWS, "the short prompt was read at home"
    assert engine.ledger.used_cells <= engine.ledger.size


def test_a_short_rest_behind_a_long_beginning_is_read_as_a_tile(runner: Runner) -> None:
    text = words(200)
    answered(runner, request(text))
    read = watched(runner)
    (answer,) = answered(runner, request(text[:150] + words(50, 9)))
    assert answer.cached_tokens >= 150
    assert read == [64]


def test_a_prompt_that_is_cancelled_while_it_is_read_leaves_nothing(runner: Runner) -> None:
    engine, away = runner.engine, reader(runner).context
    inner = away.decode
    number = engine.submit(request(words(200)))

    def cancelled(rows: BatchRows) -> list[LogitsRow]:
        away.decode = inner  # type: ignore[method-assign]
        engine.cancel(number)
        return inner(rows)

    away.decode = cancelled  # type: ignore[method-assign]
    while engine.is_busy:
        engine.step()
    engine.check()
    assert engine.pop_answer(number).finish == "cancelled"
    assert engine.ledger.used_cells == 0
    assert len(answered(runner, request(words(200)))[0].tokens) == 4


def test_what_a_slot_held_before_takes_no_room_from_the_others_of_a_pass(
    stories_gguf: Path,
) -> None:
    """One goes on behind what is cached at home, in the slot that was read last another one begins."""
    with open_runner(stories_gguf, replace(HOME, prefill_cells=512), slots=3) as runner:
        runner.engine.schedule = SERVED
        text = words(150)
        answered(runner, request(text))
        answered(runner, request(words(400, 2)))
        read = watched(runner)
        first, second = answered(runner, request(text + words(50, 3)), request(words(60, 4)))
        assert first.cached_tokens >= 150
        assert second.cached_tokens == 0
        assert read == [110], "both in one pass"


def test_a_pass_that_fails_leaves_room_for_the_next(runner: Runner) -> None:
    engine, away = runner.engine, reader(runner).context
    inner = away.decode

    def fails(rows: BatchRows) -> list[LogitsRow]:
        away.decode = inner  # type: ignore[method-assign]
        inner(rows)
        raise UserError("llama.cpp could not compute this batch")

    away.decode = fails  # type: ignore[method-assign]
    number = engine.submit(request(words(300)))
    with pytest.raises(UserError, match="could not compute"):
        engine.step()
    engine.abort(number)
    answered(runner, request(words(20, 5)))
    (answer,) = answered(runner, request(words(400, 6)))
    assert (answer.finish, len(answer.tokens)) == ("length", 4)


def test_a_pass_for_which_home_had_no_room_is_read_again(runner: Runner) -> None:
    home, prompts = runner.context, [words(60), words(70, 2)]
    inner = home.append_state

    def refuses(sequence: int, kept: memoryview, start: int) -> bool:
        home.append_state = inner  # type: ignore[method-assign]
        return False

    home.append_state = refuses  # type: ignore[method-assign]
    found = answered(runner, *map(request, prompts))
    wanted = [answered(runner, request(prompt))[0] for prompt in prompts]
    assert [answer.text for answer in found] == [answer.text for answer in wanted]
    assert runner.engine.stats.n_preemptions == 1


def test_its_bytes_are_told(runner: Runner) -> None:
    allocated = reader(runner).context.memory_breakdown()
    if allocated is None:
        pytest.skip("this build cannot be asked")
    assert runner.prefill_bytes
    assert runner.prefill_bytes > allocated.context_bytes > 0
