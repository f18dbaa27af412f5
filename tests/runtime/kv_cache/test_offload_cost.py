"""Decisions about states in host memory, over a grid of machines and models."""

import itertools

import pytest

from llmcli.runtime.kv_cache.host_budget import HostMemory, host_budget
from llmcli.runtime.kv_cache.offload_cost import (
    IdleCellCost,
    StateCost,
    is_worth_clearing,
    is_worth_restoring,
    is_worth_storing,
)

GIB = 1 << 30
TOKEN_BYTES = (512, 23_052, 28 << 10, 128 << 10, 320 << 10, 2 << 20)
TOKEN_SECONDS = (1e-5, 1e-3, 0.1, 2.0)
BYTE_SECONDS = (5e-11, 2e-10, 1e-8)


@pytest.mark.parametrize("free", [None, 0, 1 << 20, GIB, 16 * GIB, 2000 * GIB])
@pytest.mark.parametrize("group", [None, 0, 300 << 20, 8 * GIB])
@pytest.mark.parametrize("needed", [0, 100 << 20, 40 * GIB])
def test_the_budget_leaves_what_the_model_and_other_programs_need(
    free: int | None, group: int | None, needed: int
) -> None:
    budget = host_budget(HostMemory(free, group, needed))
    limits = [limit for limit in (free, group) if limit is not None]
    assert budget >= 0
    assert budget == 0 if free is None else 2 * budget <= max(0, min(limits) - needed)
    larger = host_budget(HostMemory(free and 2 * free, group, needed))
    assert larger >= budget
    assert host_budget(HostMemory(free, group, needed + GIB)) <= budget


@pytest.mark.parametrize("reuse", [1 / 32, 0.5, 1.0])
def test_states_are_stored_and_restored_when_the_expected_time_is_shorter(reuse: float) -> None:
    for tokens, per_token, token_seconds, byte_seconds in itertools.product(
        (1, 700, 100_000), TOKEN_BYTES, TOKEN_SECONDS, BYTE_SECONDS
    ):
        nbytes = tokens * per_token
        cost = StateCost(tokens, nbytes, token_seconds, byte_seconds, reuse)
        copy, compute = nbytes * byte_seconds, tokens * token_seconds
        never, stored = reuse * compute, copy + reuse * copy
        assert is_worth_storing(cost) == (stored < never)
        assert is_worth_restoring(cost) == (copy < compute)


def test_before_the_first_measurement_states_are_stored_and_cells_stay() -> None:
    assert is_worth_storing(StateCost(10, 1000, 0.0, 1e-9))
    assert is_worth_storing(StateCost(10, 1000, 0.1, 0.0))
    assert is_worth_restoring(StateCost(10, 1000, 0.0, 0.0))
    assert not is_worth_restoring(StateCost(0, 1000, 0.0, 0.0))
    assert not is_worth_clearing(IdleCellCost(9, 900, 0.0, 100, 100, 1.0, 1.0))
    assert not is_worth_clearing(IdleCellCost(9, 900, 1e-9, 100, 100, 0.0, 0.0))


def test_idle_cells_are_cleared_when_copying_takes_less_than_they_cost() -> None:
    decisions = set()
    for cells, per_token, byte_seconds, rows, cell_seconds in itertools.product(
        (0, 1, 512, 65_536), TOKEN_BYTES, BYTE_SECONDS, (0, 1, 100, 4000), (0.0, 1e-9, 1e-6, 1e-4)
    ):
        cost = IdleCellCost(
            cells, cells * per_token, byte_seconds, rows, rows, cell_seconds / 10, cell_seconds
        )
        slower = cells * rows * cell_seconds * 1.1
        copied = 2 * cells * per_token * byte_seconds
        is_close = abs(slower - copied) < 1e-9 * copied
        assert is_close or is_worth_clearing(cost) == (slower > copied)
        decisions.add(is_worth_clearing(cost))
    assert decisions == {True, False}
