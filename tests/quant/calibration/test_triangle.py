"""Sums in half a matrix are those of the whole one."""

import numpy as np
import pytest

from quant.calibration.triangle import Triangle, triangle_size, whole_matrix


def symmetric(columns: int, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).normal(size=(40, columns))
    return rows.T @ rows


@pytest.mark.parametrize("columns", [1, 255, 256, 257, 700, 1024])
def test_rows_and_the_diagonal_are_those_of_the_matrix(columns: int) -> None:
    matrix = symmetric(columns)
    triangle = Triangle(np.zeros(triangle_size(columns)), columns)
    triangle.add_matrix(matrix)
    np.testing.assert_array_equal(triangle.diagonal(), matrix.diagonal())
    stripes = [*triangle.read_stripes()]
    assert sum(stripe.size for stripe in stripes) == triangle_size(columns)
    np.testing.assert_array_equal(whole_matrix(stripes, columns), matrix.astype(np.float32))


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
    whole, expected = whole_matrix(triangle.read_stripes(), columns), matrix.astype(np.float32)
    for rows in (slice(300, 400), slice(800, 900)):
        np.testing.assert_array_equal(whole[rows], expected[rows])


def test_negative_squares_become_zero() -> None:
    triangle = Triangle(np.full(triangle_size(300), -1.0), 300)
    triangle.clip_diagonal(slice(0, 256))
    assert not triangle.diagonal()[:256].any()
    assert (triangle.diagonal()[256:] == -1).all()
    assert next(triangle.read_stripes())[1, 0] == -1


def test_it_takes_about_half_of_the_memory() -> None:
    assert triangle_size(8960) < 0.52 * 8960**2
