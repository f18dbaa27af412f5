"""Sums in half a matrix are those of the whole one."""

import numpy as np
import pytest

from quant.calibration.triangle import STRIPE_ROWS, Triangle, triangle_size


def symmetric(columns: int, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).normal(size=(40, columns))
    return rows.T @ rows


@pytest.mark.parametrize("columns", [1, 255, 256, 257, 700, 1024])
def test_rows_and_the_diagonal_are_those_of_the_matrix(columns: int) -> None:
    matrix = symmetric(columns)
    triangle = Triangle(np.zeros(triangle_size(columns)), columns)
    triangle.add_matrix(matrix)
    np.testing.assert_array_equal(triangle.diagonal(), matrix.diagonal())
    step = 100
    for start in range(0, columns, STRIPE_ROWS):
        end = min(start + STRIPE_ROWS, columns)
        for first in range(start, end, step):
            last = min(first + step, end)
            np.testing.assert_array_equal(
                triangle.read_rows(first, last), matrix.astype(np.float32)[first:last]
            )


def test_parts_are_added_where_they_belong() -> None:
    columns = 900
    matrix = symmetric(columns)
    triangle = Triangle(np.zeros(triangle_size(columns)), columns)
    for rows, across in [
        (slice(512, 900), slice(0, 512)),
        (slice(256, 512), slice(0, 256)),
        (slice(0, 256), slice(0, 256)),
        (slice(256, 512), slice(256, 512)),
        (slice(768, 900), slice(512, 768)),
        (slice(512, 768), slice(512, 768)),
        (slice(768, 900), slice(768, 900)),
    ]:
        triangle.add(rows, across, matrix[rows, across])
    np.testing.assert_array_equal(triangle.read_rows(300, 400), matrix.astype(np.float32)[300:400])
    np.testing.assert_array_equal(triangle.read_rows(800, 900), matrix.astype(np.float32)[800:])


def test_negative_squares_become_zero() -> None:
    triangle = Triangle(np.full(triangle_size(300), -1.0), 300)
    triangle.clip_diagonal(slice(0, 256))
    assert not triangle.diagonal()[:256].any()
    assert (triangle.diagonal()[256:] == -1).all()
    assert triangle.read_rows(0, 2)[1, 0] == -1


def test_it_takes_about_half_of_the_memory() -> None:
    assert triangle_size(8960) < 0.52 * 8960**2
