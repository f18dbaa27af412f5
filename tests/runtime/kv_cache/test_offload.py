"""Finished answers stay cached while the pool has room, and in host memory while the budget has."""

import random
import time
from collections.abc import Iterable

import pytest

from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.engine.schedule import Schedule
from llmcli.runtime.requests.request import Answer, Request
from llmcli.runtime.sampling import default_sampling
from tests.fixtures.fakes import FakeClock, FakeModel, TimedContext

GREEDY = default_sampling().with_values({"temp": 0})
TOKEN_BYTES = 128 << 10
NEW_TOKENS = 8


def make_engine(
    monkeypatch: pytest.MonkeyPatch, schedule: Schedule, **memory: float
) -> tuple[Engine, TimedContext]:
    """Return an engine whose passes and copies take time on a clock: 10 ms a token, 5 GB/s."""
    clock = FakeClock()
    monkeypatch.setattr(time, "perf_counter", clock)
    context = TimedContext(
        **{
            "n_ctx": 65_536,
            "n_seq_max": 14,
            "n_batch": 512,
            "reply": lambda tokens: 97 + len(tokens) % 26,
            "token_bytes": TOKEN_BYTES,
            "clock": clock,
            **memory,
        }
    )
    engine = Engine(context, FakeModel(), None, schedule=schedule, token_bytes=TOKEN_BYTES)
    return engine, context


def finish(engine: Engine, sequence: int) -> Answer:
    """Return an answer after all running answers have ended."""
    while engine.is_busy:
        engine.step()
        engine.check()
    return engine.pop_answer(sequence)


def answer(engine: Engine, tokens: Iterable[int], count: int = 1, **more: int) -> Answer:
    """Return an answer of `count` tokens to a prompt."""
    return finish(engine, engine.submit(ask(tokens, count, **more)))


def ask(tokens: Iterable[int], count: int = 1, **more: int) -> Request:
    return Request(tuple(tokens), GREEDY, count, ignore_eos=True, **more)


def reused_shares(
    engine: Engine, users: int, rounds: int = 3, answer: int = 6, seed: int = 1
) -> list[float]:
    """Let users send chats in turn. Return for each round the share of their prompts that was
    reused, without the new tokens of the turn.
    """
    rng = random.Random(seed)
    chats = [[100 * seed + user, *rng.choices(range(256), k=99)] for user in range(users)]
    shares = []
    for number in range(rounds):
        n_reused = n_reusable = 0
        for chat in chats:
            sequence = engine.submit(Request(tuple(chat), GREEDY, answer, ignore_eos=True))
            while engine.is_busy:
                engine.step()
                engine.check()
            result = engine.pop_answer(sequence)
            n_reused += result.cached_tokens
            n_reusable += len(chat) - (NEW_TOKENS + 1 if number else 0)
            chat += [token.id for token in result.tokens]
            chat += rng.choices(range(256), k=NEW_TOKENS)
        shares.append(n_reused / n_reusable)
    return shares


def test_finished_answers_stay_in_a_pool_with_room(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, context = make_engine(monkeypatch, Schedule(10, idle_offload="measured"))
    assert reused_shares(engine, 10) == [0, 1, 1]
    assert context.copied_bytes == 0


@pytest.mark.parametrize(("slots", "cells"), [(8, 65_536), (14, 512)], ids=["slots", "cells"])
def test_finished_answers_without_slots_or_cells_go_to_host_memory(
    monkeypatch: pytest.MonkeyPatch, slots: int, cells: int
) -> None:
    engine, _ = make_engine(
        monkeypatch, Schedule(4, host_bytes=1 << 30), n_seq_max=slots, n_ctx=cells
    )
    assert reused_shares(engine, 10) == [0, 1, 1]


def test_the_host_memory_keeps_the_latest_states_within_its_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget = 300 * TOKEN_BYTES
    engine, _ = make_engine(monkeypatch, Schedule(2, host_bytes=budget), n_seq_max=2)
    nbytes = []
    engine.ledger.check, check = (
        lambda: (check(), nbytes.append(engine.scheduler.offload_store.nbytes)),
        engine.ledger.check,
    )
    assert reused_shares(engine, 10)[2] == 0  # ten in turn, and four are kept
    assert reused_shares(engine, 4, seed=2)[2] == 1
    assert 0 < max(nbytes) <= budget


def test_a_state_is_not_copied_where_computing_its_tokens_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, context = make_engine(
        monkeypatch,
        Schedule(4, host_bytes=1 << 30),
        n_seq_max=4,
        row_seconds=1e-4,
        byte_seconds=1e-6,  # 0.13 s a token
    )
    reused_shares(engine, 10, rounds=4)
    # the first state measures the costs
    assert context.copied_bytes <= 2 * 200 * TOKEN_BYTES


@pytest.mark.parametrize(
    ("mode", "cell_seconds", "is_cleared"),
    [("measured", 1e-3, True), ("measured", 0.0, False), ("room", 1e-3, False)],
)
def test_idle_cells_leave_the_pool_where_they_cost_more_than_copies(
    monkeypatch: pytest.MonkeyPatch, mode: str, cell_seconds: float, is_cleared: bool
) -> None:
    engine, context = make_engine(
        monkeypatch,
        Schedule(4, idle_offload=mode, host_bytes=1 << 30),
        n_seq_max=20,
        cell_seconds=cell_seconds,
    )
    reused_shares(engine, 8, answer=12)
    assert reused_shares(engine, 8, answer=12, seed=2)[1:] == [1, 1]
    assert (engine.ledger.used_cells < 400) == is_cleared
    assert (context.copied_bytes > 0) == is_cleared


def test_a_prefix_that_idle_slots_share_is_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make_engine(monkeypatch, Schedule(4, host_bytes=1 << 30), n_seq_max=3)
    stem = tuple(range(200))
    for _ in range(2):
        for user in range(8):
            prompt = (*stem, *[250 - user] * 30)
            sequence = engine.submit(Request(prompt, GREEDY, 2, ignore_eos=True))
            while engine.is_busy:
                engine.step()
                engine.check()
            answer = engine.pop_answer(sequence)
    assert answer.cached_tokens == len(prompt) - 1
    assert engine.scheduler.idle_offload.nbytes < (200 + 8 * 40) * TOKEN_BYTES


def test_states_give_their_memory_to_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, free = [0.0], [1 << 30]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])

    def measure(held: int) -> int:
        return min(1 << 30, (free[0] + held) // 2)

    schedule = Schedule(2, host_bytes=1 << 30, measure_host_bytes=measure)
    engine, _ = make_engine(monkeypatch, schedule, n_seq_max=2)
    store = engine.scheduler.offload_store
    reused_shares(engine, 6)
    before = store.nbytes
    assert before > 4 * 100 * TOKEN_BYTES
    free[0] = 0
    seconds[0] += 60
    reused_shares(engine, 3, rounds=1, seed=2)
    assert store.nbytes <= before // 2
    free[0] = 1 << 30
    seconds[0] += 60
    assert reused_shares(engine, 6, seed=2)[2] == 1


def test_without_memory_for_a_state_its_tokens_are_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, context = make_engine(
        monkeypatch, Schedule(2, host_bytes=1 << 40), n_seq_max=4, n_ctx=300
    )
    read_state = context.read_state

    def read(sequence: int, start: int = 0) -> bytes | memoryview:
        if len(context.cells[sequence]) - start > 100:
            raise MemoryError
        return read_state(sequence, start)

    monkeypatch.setattr(context, "read_state", read)
    reused_shares(engine, 6)
    ids = [engine.submit(Request(tuple([n] * 60), GREEDY, 120, ignore_eos=True)) for n in range(3)]
    while engine.is_busy:
        engine.step()
        engine.check()
    assert engine.scheduler.n_preemptions
    assert [len(engine.pop_answer(number).tokens) for number in ids] == [120] * 3


def test_a_state_that_does_not_fit_beside_running_answers_evicts_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = make_engine(monkeypatch, Schedule(3, host_bytes=1 << 30), n_seq_max=4, n_ctx=400)
    long = tuple(range(250))
    for prompt in (long, tuple([7] * 200)):  # the second one moves the first to host memory
        engine.submit(Request(prompt, GREEDY, 2, ignore_eos=True))
        while engine.is_busy:
            engine.step()
    assert len(engine.scheduler.idle_offload) == 1
    running = engine.submit(Request(tuple([9] * 150), GREEDY, 60, ignore_eos=True))
    engine.step()
    # its beginning is in the stored state, which has more cells than are free
    short = engine.submit(Request((*long[:30], 5), GREEDY, 2, ignore_eos=True))
    engine.step()
    assert engine.ledger.match_prefix((*[7] * 45, 1))[0] == 45
    while engine.is_busy:
        engine.step()
        engine.check()
    assert engine.pop_answer(short).cached_tokens == 0
    assert len(engine.pop_answer(running).tokens) == 60


def test_a_state_that_does_not_fit_into_its_slot_now_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = make_engine(monkeypatch, Schedule(3, host_bytes=1 << 30), n_seq_max=3, n_ctx=400)
    offload, slots = engine.scheduler.idle_offload, engine.ledger.tokens
    answer(engine, range(250), slot=0)
    running = engine.submit(ask([9] * 300, 60, slot=1))
    engine.step()
    assert (len(offload), slots[0]) == (1, [])
    assert not offload.restore_slot(0)
    engine.check()
    assert (len(offload), slots[0]) == (1, [])
    assert len(finish(engine, running).tokens) == 60
    assert offload.restore_slot(0)
    assert slots[0] == list(range(250))


def test_a_slot_is_restored_together_with_the_prefix_that_its_state_leaves_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = make_engine(monkeypatch, Schedule(4, host_bytes=1 << 30))
    offload = engine.scheduler.idle_offload
    for token in (7, 8):
        answer(engine, [*range(200), *[token] * 50])
    offload.clear_pool()
    assert (engine.ledger.used_cells, offload.nbytes) == (0, 300 * TOKEN_BYTES)
    assert offload.restore_slot(0)
    engine.check()
    assert engine.ledger.tokens[0] == [*range(200), *[7] * 50]
    assert engine.ledger.used_cells == 300


@pytest.mark.parametrize("budget", [0, 50 * TOKEN_BYTES])
def test_nothing_is_copied_to_measure_it_beyond_the_budget(
    monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    engine, context = make_engine(
        monkeypatch,
        Schedule(4, idle_offload="measured", host_bytes=budget),
        n_seq_max=20,
        cell_seconds=1e-3,
    )
    for seed in (1, 2):
        reused_shares(engine, 8, answer=12, seed=seed)
    assert engine.scheduler.offload_store.costs.prefill.cell_seconds
    assert context.copied_bytes == 0


def test_a_fixed_cost_of_passes_is_not_taken_for_that_of_other_cells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, context = make_engine(monkeypatch, Schedule(1))

    def spend(number: int) -> None:
        context.clock.seconds += 0.1

    context.before = spend
    for rows in (64, 512, 128, 256) * 4:
        answer(engine, [7] * (512 + rows))
        engine.ledger.evict_idle()
    assert sorted(set(context.batches)) == [64, 128, 256, 512]
    prefill = engine.scheduler.offload_store.costs.prefill
    assert (prefill.is_measured, prefill.cell_seconds) == (False, 0)


def test_copies_around_a_pass_do_not_count_as_its_computation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, context = make_engine(
        monkeypatch, Schedule(4, host_bytes=1 << 30, min_offload_rows=64), byte_seconds=1e-8
    )
    engine.submit(ask([1] * 200, 40))
    engine.step()
    answer(engine, [2] * 300)
    assert context.copied_bytes
    assert engine.scheduler.offload_store.costs.token_seconds == pytest.approx(0.01)
    assert engine.scheduler.prefill.row_seconds > 0.0101  # the other answer waited for the copies


@pytest.mark.parametrize(
    ("slots", "cells", "others"),
    [(3, 4096, [(100, 1), (101, 1)]), (4, 620, [(250, 1)]), (2, 4096, [(100, 60)])],
    ids=["slots", "cells", "last slot"],
)
def test_a_state_does_not_replace_the_prefix_that_it_leaves_out(
    monkeypatch: pytest.MonkeyPatch, slots: int, cells: int, others: list[tuple[int, int]]
) -> None:
    engine, _ = make_engine(
        monkeypatch, Schedule(4, host_bytes=1 << 30), n_seq_max=slots, n_ctx=cells
    )
    stem = range(200)
    answer(engine, [*stem, *[7] * 100])
    mine = [*stem, *[8] * 100]
    answer(engine, mine)
    assert engine.ledger.count_cells([0, 1]) == 400
    assert engine.scheduler.idle_offload.save(1, 0)
    # the stem is now in the least recently used slot
    for token, (length, count) in enumerate(others):
        number = engine.submit(ask([50 + token] * length, count))
        engine.step()
        if count == 1:
            finish(engine, number)
    cached = answer(engine, [*mine, 9]).cached_tokens
    assert cached == (200 if slots == 2 else 300)


def test_only_the_tokens_that_would_be_lost_make_a_state_worth_storing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = make_engine(monkeypatch, Schedule(2, host_bytes=1 << 30))
    answer(engine, range(200), slot=0)
    offload, costs = engine.scheduler.idle_offload, engine.scheduler.offload_store.costs
    # of 200 tokens: a copy takes a third as long as computing them
    costs.byte_seconds = costs.token_seconds / TOKEN_BYTES / 6
    assert not offload.save(0, 190)
    assert not offload
    assert offload.save(0, 10)
    assert len(offload) == 1


def test_cells_that_several_slots_hold_are_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make_engine(
        monkeypatch, Schedule(4, idle_offload="always", host_bytes=1 << 30), n_seq_max=8
    )
    for token in range(5):
        samples = engine.submit_samples(ask([token] * 100), 3)
        for number in samples:
            finish(engine, number)
    assert [
        len(state.swapped.tokens) for state in engine.scheduler.offload_store.idle.values()
    ] == [100] * 4
    assert engine.scheduler.idle_offload.nbytes == 400 * TOKEN_BYTES
