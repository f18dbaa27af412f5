"""numpy's BLAS has threads of its own, as many as there are cores, of which llama.cpp's -t knows nothing."""

from contextlib import AbstractContextManager, nullcontext


def bounded(threads: int | None) -> AbstractContextManager[object]:
    """Matrix products inside the block take at most as many threads; None leaves them all cores."""
    if threads is None:
        return nullcontext()
    import numpy as np  # noqa: F401 (what is not loaded yet cannot be bounded)
    from threadpoolctl import threadpool_limits

    limits: AbstractContextManager[object] = threadpool_limits(threads, user_api="blas")
    return limits
