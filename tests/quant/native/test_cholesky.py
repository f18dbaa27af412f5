"""The factorization in blocks equals LAPACK's, with the same bits on any number of threads."""

import numpy as np
import pytest

from quant.native import cholesky


def positive(size: int, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).normal(size=(size * 2, size))
    return rows.T @ rows + 0.1 * np.eye(size)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 100, 129])
def test_it_equals_lapack(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cholesky, "BLOCK", 32)
    matrix = positive(size)
    lower = cholesky.factor_lower(matrix, 2)
    assert lower is not None
    np.testing.assert_allclose(lower, np.linalg.cholesky(matrix), rtol=1e-9, atol=1e-9)
    assert not np.triu(lower, 1).any()


def test_the_bits_do_not_depend_on_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cholesky, "BLOCK", 32)
    matrix = positive(200)
    first = cholesky.factor_lower(matrix, 1)
    for threads in (2, 3, 8):
        np.testing.assert_array_equal(cholesky.factor_lower(matrix, threads), first)


@pytest.mark.parametrize("at", [5, 150])
def test_a_matrix_that_is_not_positive_has_no_factor(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cholesky, "BLOCK", 32)
    matrix = positive(200)
    matrix[at, at] = -1
    assert cholesky.factor_lower(matrix, 2) is None
