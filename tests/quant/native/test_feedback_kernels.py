"""The C loops over the columns of a block do what numpy does, at every level of CPU."""

from dataclasses import replace

import numpy as np
import pytest

from quant.formats import FORMATS
from quant.methods import error_feedback
from quant.methods.column_grids import ColumnFormat, ColumnGrid, search_column_grid
from quant.native import array_backends, feedback_kernels

ROWS = 96
TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
OPS = array_backends.array_backend()
pytestmark = pytest.mark.usefixtures("each_kernel_level")


class Block:
    """A block of a panel: its weights, its grid, and a part of a matrix of second moments."""

    def __init__(self, type: str) -> None:
        assert feedback_kernels.is_installed()
        rng = np.random.default_rng(3)
        self.kind = ColumnFormat.from_format(FORMATS[type])
        size = self.kind.block_columns
        whole = rng.standard_normal((2 * size, 2 * size)).astype(np.float32)
        self.moments = (whole @ whole.T / size + np.eye(2 * size, dtype=np.float32))[size:, size:]
        self.weights = rng.standard_normal((size, ROWS)).astype(np.float32)
        self.target = self.weights + 0.1 * rng.standard_normal((size, ROWS)).astype(np.float32)
        self.feed = np.tril(0.05 * whole[:size, :size], -1)
        self.grid = search_column_grid(self.kind, self.target, self.moments.diagonal(), OPS)

    def round_columns(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the levels and the errors of the block."""
        levels, errors = np.empty_like(self.weights), np.empty_like(self.weights)
        error_feedback._round_block(
            self.grid, self.weights, self.target.copy(), self.feed, levels, errors, OPS
        )
        return levels, errors


def in_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feedback_kernels, "is_installed", lambda: False)


def agree(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the share of the panel's rows in which two arrays [.., rows] agree."""
    return float(np.isclose(ours, theirs, rtol=1e-3, atol=1e-3).all(0).mean())


@pytest.mark.parametrize("type", TYPES)
def test_columns_are_rounded_alike(type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block(type)
    levels, errors = block.round_columns()
    in_numpy(monkeypatch)
    expected_levels, expected_errors = block.round_columns()
    # A sum that ends at the middle between two levels may be rounded up or down.
    assert agree(levels, expected_levels) > 0.9
    assert agree(errors, expected_errors) > 0.9


@pytest.mark.parametrize("type", TYPES)
def test_codes_move_alike(type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block(type)
    levels, errors = block.round_columns()
    gradient = block.moments @ errors
    results = []
    for _ in range(2):
        codes, slopes = levels.copy(), gradient.copy()
        error_feedback._move_codes(block.grid, codes, slopes, block.moments, OPS)
        results.append((codes, slopes))
        in_numpy(monkeypatch)
    (codes, slopes), (expected_codes, expected_slopes) = results
    assert (codes != levels).any()
    assert agree(codes, expected_codes) > 0.9
    assert agree(slopes, expected_slopes) > 0.9


@pytest.mark.parametrize("type", [type for type in TYPES if type.endswith("K")])
def test_integer_scales_are_fitted_alike(type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block(type)
    levels, errors = block.round_columns()
    gradient = block.moments @ errors
    low, high = block.kind.scale_range or (0, 0)
    scales = np.clip(
        block.grid.scales + np.random.default_rng(5).integers(-2, 3, block.grid.scales.shape),
        low,
        high,
    )
    grid = replace(block.grid, scales=scales.astype(np.float32))
    results: list[tuple[ColumnGrid, np.ndarray]] = []
    for _ in range(2):
        slopes = gradient.copy()
        results.append(
            (error_feedback._refit_groups(grid, levels, slopes, block.moments, OPS), slopes)
        )
        in_numpy(monkeypatch)
    (fitted, slopes), (expected, expected_slopes) = results
    assert (fitted.scales != grid.scales).any()
    assert agree(fitted.scales, expected.scales) > 0.9
    assert agree(slopes, expected_slopes) > 0.9
    if expected.mins is not None:
        assert agree(fitted.mins, expected.mins) > 0.9


def test_other_shapes_are_left_to_numpy() -> None:
    layout = feedback_kernels.GridLayout(256, 32, (0, 15))
    assert layout.fits(64)
    assert not layout.fits(63)
    assert not replace(layout, columns=512).fits(64)
    assert not replace(layout, group_columns=64).fits(64)
