"""Cholesky factorization of large matrices on several threads.

LAPACK's own threads are not used: encoders limit BLAS to one thread, and the sums of LAPACK depend
on the number of threads. Here a matrix is factored in blocks of fixed size (right-looking, as
LAPACK's dpotrf), so the result has the same bits with any number of threads.

Only blocks on and below the diagonal are read and written. The kernel gives no memory to the rest
of a new array, so a factorization takes half of the memory of its arrays.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    F32 = NDArray[np.float32]
    F64 = NDArray[np.float64]

BLOCK = 512  # rows and columns
BlockRows = tuple[int, int]  # the first row of a block, and the row behind it


def factor_udu(moments: "F32", diagonal: "F64", threads: int) -> "tuple[F32, F32] | None":
    """Factor a symmetric matrix [n, n] into (I + F) D (I + F)^T, with F strictly upper triangular
    and D diagonal. The matrix is `moments` with `diagonal` [n] in place of its own.

    Return F transposed [n, n] and D [n], or None if the matrix is not positive definite. This is a
    Cholesky factorization L L^T of the matrix with its rows and columns reversed.
    """
    import numpy as np

    size, backwards = len(moments), moments[::-1, ::-1]
    lower, feed = np.empty((size, size)), np.zeros((size, size), np.float32)
    parts = split_rows(size)

    def fill(part: BlockRows) -> None:
        first, last = part
        lower[first:last, :last] = backwards[first:last, :last]

    def divide(part: BlockRows) -> None:
        first, last = part
        for above in parts:
            if above[0] > first:
                break
            columns = slice(*above)
            block = lower[first:last, columns] / root[columns]
            feed[size - above[1] : size - above[0], size - last : size - first] = block.T[
                ::-1, ::-1
            ]

    with ThreadPoolExecutor(threads, thread_name_prefix="cholesky") as pool:
        for _ in pool.map(fill, parts):
            pass
        np.fill_diagonal(lower, diagonal[::-1])
        if not factor_in_place(lower, pool):
            return None
        root = lower.diagonal().copy()
        if not np.isfinite(root).all():
            return None
        for _ in pool.map(divide, parts):
            pass
    np.fill_diagonal(feed, 0)
    return feed, (root * root)[::-1].astype(np.float32)


def split_rows(size: int) -> list[BlockRows]:
    """Return the rows of the blocks of a matrix of `size` rows."""
    return [(at, min(at + BLOCK, size)) for at in range(0, size, BLOCK)]


def factor_in_place(lower: "F64", pool: ThreadPoolExecutor) -> bool:
    """Replace the blocks on and below the diagonal of a symmetric matrix = L L^T by those of L.
    Return False if the matrix is not positive definite. `pool` runs the products.
    """
    import numpy as np

    parts = split_rows(len(lower))
    for number, (first, last) in enumerate(parts):
        corner = lower[first:last, first:last]
        try:
            corner[...] = np.linalg.cholesky(corner)
        except np.linalg.LinAlgError:
            return False
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
    return True


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
