"""Decisions of planning on machines and for models that are not here (scripts/laboratory)."""

from pathlib import Path

import pytest

from llmcli.planning.placement.placement_search import MIN_TOKENS
from llmcli.runtime.requests.request import RunOptions
from scripts.laboratory import grid
from scripts.laboratory.grid import GridPoint, find_faults, grid_points, plan_point
from scripts.laboratory.machines import GIB, MACHINES, gpu, machine
from scripts.laboratory.model_headers import MODELS, write_header

EVERY, BRUTE_FORCE_EVERY = 101, 8  # the script checks all points


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> list[GridPoint]:
    return list(grid_points(tmp_path_factory.mktemp("models")))


def find_point(points: list[GridPoint], model: str, machine_name: str, request: str) -> GridPoint:
    (point,) = (
        point
        for point in points
        if (point.model.name, point.machine_name, point.request, point.file_type)
        == (model, machine_name, request, "Q4_K_M")
    )
    return point


def test_no_decision_takes_more_than_there_is(points: list[GridPoint]) -> None:
    faults = [
        f"{point}: {fault}"
        for point in points[::EVERY]
        for fault in find_faults(point, plan_point(point))
    ]
    assert faults == []
    assert len(points) == len(MODELS) * len(MACHINES) * len(grid.FILE_TYPES) * len(grid.REQUESTS)


def test_decisions_are_near_the_best_of_all_placements(points: list[GridPoint]) -> None:
    shares = {
        str(point): grid.best_score_share(point, plan_point(point))
        for point in points[:: EVERY * BRUTE_FORCE_EVERY]
    }
    known = {name: share for name, share in shares.items() if share is not None}
    assert len(known) > len(shares) / 3
    assert {name: share for name, share in known.items() if share < grid.LEAST_SHARE} == {}


def test_a_fault_of_a_decision_is_found(points: list[GridPoint]) -> None:
    """The checks of the grid see a machine that shrinks after planning."""
    point = find_point(points, "Llama-3.1-8B", "desktop, 16 GB, GPU 8 GB", "default")
    planned = plan_point(point)
    assert planned.fits
    smaller = machine(8, 0.2, 50, gpu(4))
    faults = find_faults(
        GridPoint("", smaller, point.model, point.header, point.file_type, point.request), planned
    )
    assert {"gpu4 is too small", "the host is too small"} <= set(faults)


def test_a_model_larger_than_the_gpu_has_layers_there(points: list[GridPoint]) -> None:
    """Findings 1.1 and 1.2: no layer was offloaded, and the context had 512 tokens."""
    planned = plan_point(find_point(points, "Llama-3.1-8B", "laptop, 32 GB, GPU 6 GB", "default"))
    assert 20 < planned.placement.gpu_layers < 33
    assert planned.n_ctx == 8192
    for request in ("-ngl 20", "-ngl 0"):
        point = find_point(points, "Llama-3.1-8B", "laptop, 32 GB, GPU 6 GB", request)
        assert plan_point(point).n_ctx == 8192


def test_each_device_is_filled_by_itself(points: list[GridPoint]) -> None:
    """Two GPUs of 24 and 8 GB do not hold what one of 32 GB holds, if a layer is too large for the
    rest of both.
    """
    point = find_point(points, "Llama-3.3-70B", "desktop, GPUs 24 and 8 GB", "default")
    planned = plan_point(point)
    large, small = planned.memory[1:]
    assert large.total > 2 * small.total > 0
    assert sum(planned.placement.tensor_split) == planned.placement.gpu_layers


def test_experts_stay_on_the_host_before_layers_do(points: list[GridPoint]) -> None:
    planned = plan_point(
        find_point(points, "Qwen3-30B-A3B", "desktop, 32 GB, GPU 12 GB", "default")
    )
    assert planned.placement.gpu_layers == -1
    assert 0 < planned.placement.cpu_moe_layers < 48


def test_the_context_is_shortened_before_layers_leave_the_gpu_but_not_below_what_is_useful(
    tmp_path: Path,
) -> None:
    model = next(model for model in MODELS if model.name == "Phi-3.5-mini")
    header = grid.read_header(write_header(model, tmp_path / "m.gguf"))
    # all layers fit with 4,096 tokens, but not with 8,192
    small = machine(8, 26, 50, gpu(4.5, 400, free=1.0))
    planned = grid.plan_placement(header, RunOptions(), small, 8192)
    assert MIN_TOKENS <= planned.n_ctx < 8192
    assert planned.memory[1].total <= 4.5 * GIB
