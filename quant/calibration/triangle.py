"""Symmetric matrices of sums in half the memory: only the lower triangle is stored, in stripes of
STRIPE_ROWS rows. A stripe has all columns up to the end of its square on the diagonal, so products
can be added to it as to any matrix.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
STRIPE_ROWS = 256


def triangle_size(columns: int) -> int:
    """Return how many numbers the triangle of a matrix [columns, columns] takes."""
    return sum(
        (last - first) * last
        for first in range(0, columns, STRIPE_ROWS)
        for last in [min(first + STRIPE_ROWS, columns)]
    )


class Triangle:
    """The lower triangle of a symmetric matrix [columns, columns], in the array `numbers` of
    `triangle_size(columns)` numbers. What is above the diagonal in a stripe means nothing.
    """

    def __init__(self, numbers: F64, columns: int) -> None:
        assert numbers.shape == (triangle_size(columns),), (numbers.shape, columns)
        self.columns = columns
        self._stripes: list[F64] = []
        at = 0
        for first in range(0, columns, STRIPE_ROWS):
            last = min(first + STRIPE_ROWS, columns)
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

    def read_rows(self, first: int, last: int) -> F32:
        """Return rows of the whole matrix as float32 [last - first, columns], of one stripe."""
        number = first // STRIPE_ROWS
        start, stripe = number * STRIPE_ROWS, self._stripes[number]
        assert last <= start + len(stripe), (first, last)
        rows = np.empty((last - first, self.columns), np.float32)
        rows[:, :last] = stripe[first - start : last - start, :last]
        rows[:, last : start + len(stripe)] = stripe[last - start :, first:last].T
        for below_first, below in self._within(start + len(stripe), self.columns):
            rows[:, below_first : below_first + len(below)] = below[:, first:last].T
        corner = rows[:, first:last]
        corner[...] = np.tril(corner) + np.tril(corner, -1).T
        return rows

    def _within(self, first: int, last: int) -> Iterator[tuple[int, F64]]:
        """Yield the stripes with any of these rows, each with the number of its first row."""
        for number in range(first // STRIPE_ROWS, -(-last // STRIPE_ROWS)):
            yield number * STRIPE_ROWS, self._stripes[number]
