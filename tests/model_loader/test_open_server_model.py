"""The limits of a server's engine, on a CPU and on a GPU."""

from dataclasses import replace

import pytest

from llmcli.model_loader import open_server_model
from llmcli.planning import state_budget
from llmcli.runtime.binding.placement import devices
from llmcli.runtime.engine.forward_pass import TILE_ROWS
from llmcli.runtime.engine.schedule import Schedule
from llmcli.runtime.runner import Runner
from tests.fixtures.fakes import fake_runner


def make_schedule(runner: Runner) -> Schedule:
    return open_server_model._make_schedule(runner, 4, 0.5, share_prefixes=True)


@pytest.mark.parametrize(
    ("free_gpu", "layers", "kv_offload", "is_on_gpu"),
    [
        (None, "all", True, False),
        (8 << 30, "0", True, False),
        (8 << 30, "all", True, True),
        (8 << 30, "12", True, True),
        (8 << 30, "all", False, False),
    ],
)
def test_cells_on_a_gpu_are_not_copied_while_the_pool_has_room(
    monkeypatch: pytest.MonkeyPatch,
    free_gpu: int | None,
    layers: str,
    kv_offload: bool,
    is_on_gpu: bool,
) -> None:
    monkeypatch.setattr(devices, "free_gpu_bytes", lambda: free_gpu)
    runner = fake_runner()
    runner.options = replace(runner.options, gpu_layers=layers, kv_offload=kv_offload)
    schedule = make_schedule(runner)
    assert schedule.idle_offload == ("room" if is_on_gpu else "measured")
    assert schedule.min_offload_rows == (None if is_on_gpu else TILE_ROWS)


def test_the_budget_of_states_follows_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = 12_345
    monkeypatch.setattr(state_budget, "address_free_bytes", lambda: None)
    for free, group, held in ((10**9, None, 0), (10**9, 10**8, 0), (10**8, None, 10**8)):
        monkeypatch.setattr(state_budget, "available_memory", lambda free=free: free)
        monkeypatch.setattr(state_budget, "group_free_bytes", lambda group=group: group)
        expected = (min(free, group or free) + held - mapped) // 2
        assert state_budget.state_budget(mapped, held) == expected
    monkeypatch.setattr(state_budget, "available_memory", lambda: None)
    assert state_budget.state_budget(mapped) == 0
    # a limit of the address space already counts the mapped file
    monkeypatch.setattr(state_budget, "available_memory", lambda: 10**9)
    monkeypatch.setattr(state_budget, "group_free_bytes", lambda: None)
    monkeypatch.setattr(state_budget, "address_free_bytes", lambda: 10**6)
    assert state_budget.state_budget(mapped) == 500_000
