"""The rows of a pass over a grid of machines: from 10 s to 10 µs a row, with and without answers."""

import itertools

import pytest

from llmcli.runtime.engine.chunk_rows import PassLimits, choose_max_rows
from llmcli.runtime.engine.forward_pass import TILE_ROWS
from llmcli.runtime.engine.scheduler_state import MAX_FORCED_TOKENS

ROW_SECONDS = (0.0, 1e-5, 2e-4, 1e-3, 0.01, 0.5, 10.0)


@pytest.mark.parametrize("gap", [0.05, 0.5, 2.0])
@pytest.mark.parametrize("uses_tiles", [True, False])
def test_a_pass_beside_answers_fits_the_gap_as_far_as_rows_can_be_divided(
    gap: float, uses_tiles: bool
) -> None:
    for row_seconds, n_decoding, n_batch, n_ubatch in itertools.product(
        ROW_SECONDS, (1, 4, 64), (512, 2048, 8192), (64, 512)
    ):
        limits = PassLimits(n_batch, n_ubatch, gap, row_seconds, n_decoding, uses_tiles)
        rows = choose_max_rows(limits)
        assert 0 < rows <= n_batch
        least = max(TILE_ROWS if uses_tiles else MAX_FORCED_TOKENS, n_decoding + MAX_FORCED_TOKENS)
        if row_seconds and rows > least:
            assert rows * row_seconds <= gap + TILE_ROWS / 2 * row_seconds
        if row_seconds and rows < n_batch:
            assert (rows + TILE_ROWS) * row_seconds > gap  # as long as it may be


def test_a_fast_machine_is_not_limited_to_a_micro_batch() -> None:
    """A GPU with 10,000 rows a second computes whole batches, beside answers and alone."""
    for n_decoding in (0, 8):
        assert choose_max_rows(PassLimits(2048, 512, 0.5, 1e-4, n_decoding, False)) == 2048


@pytest.mark.parametrize("row_seconds", ROW_SECONDS)
def test_without_answers_a_pass_has_whole_micro_batches(row_seconds: float) -> None:
    """The logits are then the same on a fast and on a slow machine."""
    for n_ubatch, n_batch in ((64, 2048), (512, 2048), (512, 512)):
        rows = choose_max_rows(PassLimits(n_batch, n_ubatch, 0.5, row_seconds, 0, True))
        assert rows % n_ubatch == 0
        assert rows == n_ubatch or rows * row_seconds <= 0.5


def test_without_a_gap_a_pass_has_all_rows() -> None:
    assert choose_max_rows(PassLimits(2048, 512, None, 0.5, 3, True)) == 2048
