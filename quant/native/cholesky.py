"""Cholesky factorization of large matrices on several threads.

LAPACK's own threads are not used: encoders limit BLAS to one thread, and the sums of LAPACK depend
on the number of threads. Here a matrix is factored in blocks of fixed size (right-looking, as
LAPACK's dpotrf), so the result has the same bits with any number of threads.

Only blocks on and below the diagonal are read and written. The kernel gives no memory to the rest
of a new array, so a factorization takes half of the memory of its arrays.

float32 is tried first, which takes half of the time and memory of float64. Its rounding errors are
far below the damping of the moments that GPTQ factors, and GPTQ measures its errors with the
moments themselves.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

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

    with ThreadPoolExecutor(threads, thread_name_prefix="cholesky") as pool:
        for kind in (np.float32, np.float64):
            lower = _reverse(moments, diagonal, kind, pool)
            if factor_in_place(lower, pool) and np.isfinite(root := lower.diagonal().copy()).all():
                return _transposed_factor(lower, pool), (root * root)[::-1].astype(np.float32)
    return None


def _reverse(
    moments: "F32", diagonal: "F64", kind: "type[Any]", pool: ThreadPoolExecutor
) -> "NDArray[Any]":
    """Return the blocks on and below the diagonal of the matrix `moments` with another diagonal, as
    numbers of type `kind`, with its rows and columns reversed.
    """
    import numpy as np

    lower, backwards = np.empty(moments.shape, kind), moments[::-1, ::-1]

    def fill(part: BlockRows) -> None:
        first, last = part
        lower[first:last, :last] = backwards[first:last, :last]

    _run(pool, (partial(fill, part) for part in split_rows(len(lower))))
    np.fill_diagonal(lower, diagonal[::-1])
    return lower


def _transposed_factor(lower: "NDArray[Any]", pool: ThreadPoolExecutor) -> "F32":
    """Return F transposed from L, the factor of the reversed matrix."""
    import numpy as np

    size, root, parts = len(lower), lower.diagonal().copy(), split_rows(len(lower))
    feed = np.zeros(lower.shape, np.float32)

    def divide(down: BlockRows, across: BlockRows) -> None:
        block = lower[slice(*down), slice(*across)] / root[slice(*across)]
        rows, columns = (slice(size - last, size - first) for first, last in (across, down))
        feed[rows, columns] = block.T[::-1, ::-1]

    pairs = ((down, across) for down in parts for across in parts if across <= down)
    _run(pool, (partial(divide, *pair) for pair in pairs))
    np.fill_diagonal(feed, 0)
    return feed


def split_rows(size: int) -> list[BlockRows]:
    """Return the rows of the blocks of a matrix of `size` rows."""
    return [(at, min(at + BLOCK, size)) for at in range(0, size, BLOCK)]


def factor_in_place(lower: "NDArray[Any]", pool: ThreadPoolExecutor) -> bool:
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
        inverse = np.linalg.inv(corner).T.astype(lower.dtype, copy=False)
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


def _divide(
    lower: "NDArray[Any]", part: BlockRows, step: BlockRows, inverse: "NDArray[Any]"
) -> Callable[[], None]:
    """Return a task: multiply a block below the diagonal with the inverse of the diagonal block."""

    def task() -> None:
        block = lower[slice(*part), slice(*step)]
        block[...] = block @ inverse

    return task


def _subtract(
    lower: "NDArray[Any]", part: BlockRows, other: BlockRows, step: BlockRows
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
