"""The factorization in blocks equals LAPACK's, with the same bits on any number of threads."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from quant.native import cholesky


def positive(size: int, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).normal(size=(size * 2, size))
    return rows.T @ rows + 0.1 * np.eye(size)


def lower_factor(matrix: np.ndarray, threads: int) -> np.ndarray | None:
    """Return L of the matrix = L L^T in float64. What is above the diagonal, NaN, is not read."""
    lower = np.where(np.tri(len(matrix), dtype=bool), matrix, np.nan)
    with ThreadPoolExecutor(threads) as pool:
        return np.tril(lower) if cholesky.factor_in_place(lower, pool) else None


@pytest.mark.parametrize("size", [1, 31, 32, 33, 100, 129])
def test_it_equals_lapack(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cholesky, "BLOCK", 32)
    matrix = positive(size)
    lower = lower_factor(matrix, 2)
    assert lower is not None
    np.testing.assert_allclose(lower, np.linalg.cholesky(matrix), rtol=1e-9, atol=1e-9)


def test_the_bits_do_not_depend_on_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cholesky, "BLOCK", 32)
    matrix = positive(200)
    first = lower_factor(matrix, 1)
    for threads in (2, 3, 8):
        np.testing.assert_array_equal(lower_factor(matrix, threads), first)


@pytest.mark.parametrize("at", [5, 150])
def test_a_matrix_that_is_not_positive_has_no_factor(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cholesky, "BLOCK", 32)
    matrix = positive(200)
    matrix[at, at] = -1
    assert lower_factor(matrix, 2) is None
    moments = matrix.astype(np.float32)
    assert cholesky.factor_udu(moments, moments.diagonal().astype(np.float64), 2) is None


@pytest.mark.parametrize("size", [1, 32, 33, 100])
def test_udu_gives_the_matrix_with_another_diagonal(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cholesky, "BLOCK", 32)
    moments = positive(size).astype(np.float32)
    matrix = moments.astype(np.float64)
    np.fill_diagonal(matrix, matrix.diagonal() + np.arange(size))
    factors = cholesky.factor_udu(moments, matrix.diagonal().copy(), 2)
    assert factors is not None
    feed, weights = factors
    assert not np.triu(feed).any()
    upper = feed.T + np.eye(size)
    np.testing.assert_allclose((upper * weights) @ upper.T, matrix, rtol=1e-4, atol=1e-3)


def test_a_matrix_that_is_singular_in_float32_is_factored_in_float64() -> None:
    diagonal = np.full(8, 1 + 1e-9)  # all other entries are 1
    factors = cholesky.factor_udu(np.ones((8, 8), np.float32), diagonal, 1)
    assert factors is not None
    assert 0 < factors[1].min() < 1e-8
    assert cholesky.factor_udu(np.ones((8, 8), np.float32), np.ones(8), 1) is None
