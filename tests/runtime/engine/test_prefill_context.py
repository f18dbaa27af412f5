"""Prompts computed in the prefill context: their moved cells equal those computed in the decoding
context.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmcli.errors import UserError
from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.kv_state import sequence_state
from llmcli.runtime.binding.kv_state.state_slicing import extract_sequence, transpose_values
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.binding.rows.logits_row import LogitsRow
from llmcli.runtime.engine.prefill_context import MIN_ROWS, PrefillContext
from llmcli.runtime.engine.schedule import Schedule
from llmcli.runtime.requests.request import Answer, Request, RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import default_sampling

DECODE_OPTIONS = RunOptions(
    ctx_size=1024, threads=1, flash_attn="off", cache_type_k="f32", cache_type_v="f32"
)
SCHEDULE = Schedule(
    max_running=3,
    max_gap_seconds=0.5,
    idle_offload="always",
    host_bytes=1 << 29,
    min_prefill_rows=MIN_ROWS,
)
# largest relative squared error of logits: the two kinds of attention sum in different orders
MAX_ERROR = 1e-6


def random_tokens(count: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(count)]


@pytest.fixture
def runner(stories_gguf: Path) -> Iterator[Runner]:
    with open_runner(stories_gguf, replace(DECODE_OPTIONS, prefill_cells=512), slots=4) as opened:
        opened.engine.schedule = SCHEDULE
        yield opened


def prefill_context(runner: Runner) -> PrefillContext:
    assert isinstance(runner.engine.prefill_reader, PrefillContext)
    return runner.engine.prefill_reader


def record_rows(runner: Runner) -> list[int]:
    """Return a list to which each later pass of the prefill context appends its number of rows."""
    n_rows: list[int] = []
    context = prefill_context(runner).context
    original_decode = context.decode

    def recording_decode(rows: BatchRows) -> list[LogitsRow]:
        n_rows.append(len(rows))
        return original_decode(rows)

    context.decode = recording_decode  # type: ignore[method-assign]
    return n_rows


def fill(context: Context, slot: int, tokens: Sequence[int], start: int = 0) -> None:
    """Compute tokens of a slot from position `start` on."""
    end = start + len(tokens)
    context.decode(
        BatchRows(
            list(tokens), list(range(start, end)), [slot] * len(tokens), [False] * len(tokens)
        )
    )


def next_logits(context: Context, slot: int, at: int) -> np.ndarray:
    """Return the logits after one more token at position `at` of a slot."""
    return context.decode(BatchRows([7], [at], [slot], [True]))[0].logits.copy()


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.square(found - expected).sum() / np.square(expected).sum())


def request(tokens: Sequence[int], max_tokens: int = 4) -> Request:
    sampling = default_sampling().with_values({"temp": 0})
    return Request(
        tuple(tokens), sampling, max_tokens, ignore_eos=True, logprobs=True, top_logprobs=5
    )


def answer_all(runner: Runner, *requests: Request) -> list[Answer]:
    engine = runner.engine
    ids = [engine.submit(request) for request in requests]
    while engine.is_busy:
        engine.step()
    engine.check()
    return [engine.pop_answer(number) for number in ids]


def first_logprobs(answer: Answer) -> dict[int, float]:
    return {entry.token: entry.logprob for entry in answer.top_logprobs[0]}


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_moved_cells_give_the_logits_of_cells_computed_in_place(
    stories_gguf: Path, kind: str
) -> None:
    text = random_tokens(100)
    options = replace(DECODE_OPTIONS, prefill_cells=512, cache_type_k=kind, cache_type_v=kind)
    with open_runner(stories_gguf, options, slots=4) as runner:
        decode_context, prefill = runner.context, prefill_context(runner).context
        fill(decode_context, 0, text)
        expected = next_logits(decode_context, 0, 100)
        fill(prefill, 1, text)
        assert decode_context.append_state(1, transpose_values(prefill.read_state(1)), 0)
        assert relative_error(next_logits(decode_context, 1, 100), expected) < (
            MAX_ERROR if kind == "f32" else 1e-3
        )
        assert prefill.write_state(2, transpose_values(decode_context.read_state(1)))
        assert prefill.trim(2, 100)
        assert relative_error(next_logits(prefill, 2, 100), expected) < (
            MAX_ERROR if kind == "f32" else 1e-3
        )


def test_cells_are_appended_to_a_shared_prefix(runner: Runner) -> None:
    text, decode_context, prefill = (
        random_tokens(100),
        runner.context,
        prefill_context(runner).context,
    )
    fill(decode_context, 0, text)
    expected = next_logits(decode_context, 0, 100)
    assert decode_context.trim(0, 60)
    decode_context.copy(0, 1, 0, 60)
    fill(prefill, 1, text)
    assert decode_context.append_state(1, transpose_values(prefill.read_state(1), 60), 60)
    assert (
        decode_context.first_position(1),
        decode_context.last_position(1),
        decode_context.last_position(0),
    ) == (0, 99, 59)
    assert relative_error(next_logits(decode_context, 1, 100), expected) < MAX_ERROR
    assert decode_context.trim(0, 0), "cells shared with slot 1 can be dropped from slot 0"
    assert relative_error(next_logits_after_trim(decode_context, 1), expected) < MAX_ERROR


def next_logits_after_trim(context: Context, slot: int) -> np.ndarray:
    assert context.trim(slot, 100)
    return next_logits(context, slot, 100)


def test_a_state_transposed_twice_is_unchanged(runner: Runner) -> None:
    fill(runner.context, 0, random_tokens(50))
    state = runner.context.read_state(0)
    assert (
        bytes(transpose_values(transpose_values(state)))
        == bytes(state)
        != bytes(transpose_values(state))
    )


@pytest.mark.parametrize("flash", ["on", "off"])
def test_a_sequence_cut_out_of_the_pool_s_state_equals_its_state_from_llama_cpp(
    stories_gguf: Path, flash: str
) -> None:
    """The pool has interleaved cells of several slots, cells shared by two slots, a hole, and slots
    of different lengths.
    """
    with open_runner(
        stories_gguf, replace(DECODE_OPTIONS, flash_attn=flash, cache_type_v="f16"), slots=4
    ) as runner:
        decode_context = runner.context
        fill(decode_context, 0, random_tokens(30))
        decode_context.copy(0, 1, 0, 20)
        fill(decode_context, 1, random_tokens(10, 2), 20)
        fill(decode_context, 2, random_tokens(25, 3))
        for turn in range(5):
            at = [30 + turn, 30 + turn, 25 + turn]
            decode_context.decode(BatchRows([5, 6, 7], at, [0, 1, 2], [False] * 3))
        assert decode_context.trim(2, 27)
        for slot in (0, 1, 2):
            own = sequence_state.read_state(decode_context.pointer, slot)
            assert bytes(
                sequence_state.read_state(decode_context.pointer, slot, is_scattered=True)
            ) == bytes(own)


def test_scattered_cells_are_read_with_the_state_of_the_whole_pool(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_sequences: list[int] = []

    def recording_extract(pool: memoryview, sequence: int) -> memoryview:
        cut_sequences.append(sequence)
        return extract_sequence(pool, sequence)

    monkeypatch.setattr(sequence_state, "extract_sequence", recording_extract)
    fill(runner.context, 0, random_tokens(30))
    fill(runner.context, 1, random_tokens(30))
    alone = bytes(runner.context.read_state(0))
    assert not cut_sequences
    for at in range(30, 40):
        runner.context.decode(BatchRows([5, 6], [at, at], [0, 1], [False] * 2))
    mixed = runner.context.read_state(0)
    assert cut_sequences == [0]
    assert len(mixed) > len(alone)
    assert runner.context.write_state(2, mixed)
    assert (
        relative_error(next_logits(runner.context, 2, 40), next_logits(runner.context, 0, 40))
        < MAX_ERROR
    )


def test_a_sequence_is_unchanged_when_the_decoding_context_has_no_room(stories_gguf: Path) -> None:
    with open_runner(
        stories_gguf, replace(DECODE_OPTIONS, ctx_size=256, prefill_cells=256), slots=2
    ) as runner:
        decode_context, prefill = runner.context, prefill_context(runner).context
        fill(decode_context, 0, random_tokens(200, 2))
        fill(decode_context, 1, random_tokens(20))
        expected = next_logits(decode_context, 1, 20)
        assert decode_context.trim(1, 20)
        fill(prefill, 1, random_tokens(100))
        assert not decode_context.append_state(1, transpose_values(prefill.read_state(1), 20), 20)
        assert relative_error(next_logits(decode_context, 1, 20), expected) < MAX_ERROR


def test_answers_equal_those_of_a_context_that_computes_prompts_itself(
    runner: Runner, stories_gguf: Path
) -> None:
    """The prompts are long or short, and some share a prefix with a running or a cached prompt."""
    common = random_tokens(150)
    prompts = [
        common,
        common[:130] + random_tokens(10, 3),
        random_tokens(20, 4),
        random_tokens(300, 5),
        common + random_tokens(60, 6),
    ]
    n_rows, engine = record_rows(runner), runner.engine
    found = answer_all(runner, *map(request, prompts[:3])) + answer_all(
        runner, *map(request, prompts[3:])
    )
    with open_runner(stories_gguf, DECODE_OPTIONS, slots=4) as plain:
        expected = [answer_all(plain, request(prompt))[0] for prompt in prompts]
    for found_answer, expected_answer in zip(found, expected, strict=True):
        first, second = first_logprobs(found_answer), first_logprobs(expected_answer)
        both = first.keys() & second.keys()
        assert len(both) >= 3 and all(abs(first[token] - second[token]) < 0.01 for token in both)
    assert n_rows and min(n_rows) >= MIN_ROWS, (
        "the short prompt was computed in the decoding context"
    )
    assert engine.ledger.used_cells <= engine.ledger.size


def test_the_short_rest_of_a_cached_prompt_is_computed_as_a_full_tile(runner: Runner) -> None:
    text = random_tokens(200)
    answer_all(runner, request(text))
    n_rows = record_rows(runner)
    (answer,) = answer_all(runner, request(text[:150] + random_tokens(50, 9)))
    assert answer.cached_tokens >= 150
    assert n_rows == [64]


def test_a_prompt_cancelled_during_its_pass_leaves_no_cells(runner: Runner) -> None:
    engine, prefill = runner.engine, prefill_context(runner).context
    original_decode = prefill.decode
    number = engine.submit(request(random_tokens(200)))

    def cancelling_decode(rows: BatchRows) -> list[LogitsRow]:
        prefill.decode = original_decode  # type: ignore[method-assign]
        engine.cancel(number)
        return original_decode(rows)

    prefill.decode = cancelling_decode  # type: ignore[method-assign]
    while engine.is_busy:
        engine.step()
    engine.check()
    assert engine.pop_answer(number).finish == "cancelled"
    assert engine.ledger.used_cells == 0
    assert len(answer_all(runner, request(random_tokens(200)))[0].tokens) == 4


def test_old_cells_of_a_slot_take_no_room_from_the_prompts_of_a_pass(
    stories_gguf: Path,
) -> None:
    """One prompt continues cells that only the decoding context still has. Another one starts in
    the slot whose old cells fill the prefill context.
    """
    with open_runner(stories_gguf, replace(DECODE_OPTIONS, prefill_cells=512), slots=3) as runner:
        runner.engine.schedule = SCHEDULE
        text = random_tokens(150)
        answer_all(runner, request(text))
        answer_all(runner, request(random_tokens(400, 2)))
        n_rows = record_rows(runner)
        first, second = answer_all(
            runner, request(text + random_tokens(50, 3)), request(random_tokens(60, 4))
        )
        assert first.cached_tokens >= 150
        assert second.cached_tokens == 0
        assert n_rows == [110], "both in one pass"


def test_a_failed_pass_leaves_room_for_the_next_pass(runner: Runner) -> None:
    engine, prefill = runner.engine, prefill_context(runner).context
    original_decode = prefill.decode

    def failing_decode(rows: BatchRows) -> list[LogitsRow]:
        prefill.decode = original_decode  # type: ignore[method-assign]
        original_decode(rows)
        raise UserError("llama.cpp could not compute this batch")

    prefill.decode = failing_decode  # type: ignore[method-assign]
    number = engine.submit(request(random_tokens(300)))
    with pytest.raises(UserError, match="could not compute"):
        engine.step()
    engine.abort(number)
    answer_all(runner, request(random_tokens(20, 5)))
    (answer,) = answer_all(runner, request(random_tokens(400, 6)))
    assert (answer.finish, len(answer.tokens)) == ("length", 4)


def test_a_pass_is_repeated_when_the_decoding_context_had_no_room(runner: Runner) -> None:
    decode_context, prompts = runner.context, [random_tokens(60), random_tokens(70, 2)]
    original_append = decode_context.append_state

    def refusing_append(sequence: int, saved_state: memoryview, start: int) -> bool:
        decode_context.append_state = original_append  # type: ignore[method-assign]
        return False

    decode_context.append_state = refusing_append  # type: ignore[method-assign]
    found = answer_all(runner, *map(request, prompts))
    expected = [answer_all(runner, request(prompt))[0] for prompt in prompts]
    assert [answer.text for answer in found] == [answer.text for answer in expected]
    assert runner.engine.stats.n_preemptions == 1


def test_the_bytes_of_the_prefill_context_are_reported(runner: Runner) -> None:
    allocated = prefill_context(runner).context.memory_breakdown()
    if allocated is None:
        pytest.skip("this build does not report its memory")
    assert runner.prefill_bytes
    assert runner.prefill_bytes > allocated.context_bytes > 0
