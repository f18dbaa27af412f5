"""Symmetric matrices of sums in half the memory: only the lower triangle is stored, in stripes of
STRIPE_ROWS rows. A stripe has all columns up to the end of its square on the diagonal, so products
can be added to it as to any matrix.
"""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
STRIPE_ROWS = 256


def stripe_rows(columns: int) -> Iterator[tuple[int, int]]:
    """Yield the first row of each stripe of a matrix [columns, columns], and the row behind it."""
    for first in range(0, columns, STRIPE_ROWS):
        yield first, min(first + STRIPE_ROWS, columns)


def triangle_size(columns: int) -> int:
    """Return how many numbers the triangle of a matrix [columns, columns] takes."""
    return sum((last - first) * last for first, last in stripe_rows(columns))


def whole_matrix(stripes: Iterable[F32], columns: int) -> F32:
    """Return the symmetric matrix [columns, columns] with these stripes."""
    matrix = np.empty((columns, columns), np.float32)
    for (first, last), stripe in zip(stripe_rows(columns), stripes, strict=True):
        matrix[first:last, :last] = stripe
        matrix[:first, first:last] = stripe[:, :first].T
    return matrix


class Triangle:
    """The lower triangle of a symmetric matrix [columns, columns], in the array `numbers` of
    `triangle_size(columns)` numbers. What is above the diagonal in a stripe means nothing.
    """

    def __init__(self, numbers: F64, columns: int) -> None:
        assert numbers.shape == (triangle_size(columns),), (numbers.shape, columns)
        self.columns = columns
        self._stripes: list[F64] = []
        at = 0
        for first, last in stripe_rows(columns):
            self._stripes.append(numbers[at : at + (last - first) * last].reshape(-1, last))
            at += (last - first) * last

    def add(self, rows: slice, columns: slice, numbers: NDArray[np.floating]) -> None:
        """Add numbers to a part of the matrix, which ends no later than the square on the diagonal
        in each of its stripes.
        """
        for first, stripe in self._within(rows.start, rows.stop):
            begin, end = max(rows.start, first), min(rows.stop, first + len(stripe))
            stripe[begin - first : end - first, columns] += numbers[
                begin - rows.start : end - rows.start
            ]

    def add_matrix(self, matrix: NDArray[np.floating]) -> None:
        """Add a symmetric matrix [columns, columns]."""
        for first, stripe in self._within(0, self.columns):
            stripe += matrix[first : first + len(stripe), : stripe.shape[1]]

    def diagonal(self) -> F64:
        """Return the diagonal [columns]."""
        return np.concatenate(
            [stripe.diagonal(first) for first, stripe in self._within(0, self.columns)]
        )

    def clip_diagonal(self, rows: slice) -> None:
        """Replace negative numbers on the diagonal by 0."""
        for first, stripe in self._within(rows.start, rows.stop):
            square = stripe[:, first:]
            np.fill_diagonal(square, np.maximum(square.diagonal(), 0))

    def read_stripes(self) -> Iterator[F32]:
        """Yield the stripes as float32, with symmetric squares on the diagonal."""
        for (first, last), numbers in zip(stripe_rows(self.columns), self._stripes, strict=True):
            stripe = numbers.astype(np.float32)
            square = stripe[:, first:last]
            square[...] = np.tril(square) + np.tril(square, -1).T
            yield stripe

    def _within(self, first: int, last: int) -> Iterator[tuple[int, F64]]:
        """Yield the stripes with any of these rows, each with the number of its first row."""
        for number in range(first // STRIPE_ROWS, -(-last // STRIPE_ROWS)):
            yield number * STRIPE_ROWS, self._stripes[number]
