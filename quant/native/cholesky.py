"""Cholesky factorization of large matrices on several threads.

LAPACK's own threads are not used: encoders limit BLAS to one thread, and the sums of LAPACK depend
on the number of threads. Here a matrix is factored in blocks of fixed size (right-looking, as
LAPACK's dpotrf), so the result has the same bits with any number of threads.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    F64 = NDArray[np.float64]

BLOCK = 512  # rows and columns
BlockRows = tuple[int, int]  # the first row of a block, and the row behind it


def factor_lower(matrix: "F64", threads: int) -> "F64 | None":
    """Return the lower triangular L of a symmetric matrix = L L^T, of which only the lower triangle
    is read. Return None if the matrix is not positive definite.
    """
    import numpy as np

    lower = np.array(matrix, order="C")
    parts = [(at, min(at + BLOCK, len(lower))) for at in range(0, len(lower), BLOCK)]
    with ThreadPoolExecutor(threads, thread_name_prefix="cholesky") as pool:
        for number, (first, last) in enumerate(parts):
            corner = lower[first:last, first:last]
            try:
                corner[...] = np.linalg.cholesky(corner)
            except np.linalg.LinAlgError:
                return None
            inverse: F64 = np.linalg.inv(corner).T.astype(np.float64, copy=False)
            rest = parts[number + 1 :]
            _run(pool, (_divide(lower, part, (first, last), inverse) for part in rest))
            _run(
                pool,
                (
                    _subtract(lower, part, other, (first, last))
                    for index, part in enumerate(rest)
                    for other in rest[: index + 1]
                ),
            )
    return np.tril(lower)


def _divide(lower: "F64", part: BlockRows, step: BlockRows, inverse: "F64") -> Callable[[], None]:
    """Return a task: multiply a block below the diagonal with the inverse of the diagonal block."""

    def task() -> None:
        block = lower[slice(*part), slice(*step)]
        block[...] = block @ inverse

    return task


def _subtract(
    lower: "F64", part: BlockRows, other: BlockRows, step: BlockRows
) -> Callable[[], None]:
    """Return a task: subtract the finished columns of `step` from a later block."""

    def task() -> None:
        columns = slice(*step)
        lower[slice(*part), slice(*other)] -= (
            lower[slice(*part), columns] @ lower[slice(*other), columns].T
        )

    return task


def _run(pool: ThreadPoolExecutor, tasks: Iterator[Callable[[], None]]) -> None:
    """Run independent tasks, and wait until all have ended. Raises their errors."""
    for future in [pool.submit(task) for task in tasks]:
        future.result()
