"""numpy's BLAS has threads of its own, as many as there are cores, of which llama.cpp's -t knows nothing."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial


def bounded(threads: int | None) -> AbstractContextManager[object]:
    """Matrix products inside the block take at most as many threads; None leaves them all cores."""
    if threads is None:
        return nullcontext()
    import numpy as np  # noqa: F401 (what is not loaded yet cannot be bounded)
    from threadpoolctl import threadpool_limits

    limits: AbstractContextManager[object] = threadpool_limits(threads, user_api="blas")
    return limits


def alone() -> Callable[[], AbstractContextManager[object]]:
    """What bounds matrix products to the calling thread, at little cost each time: for those in the middle of a pass,
    since llama.cpp's other threads wait awake for its next node."""
    import numpy as np  # noqa: F401 (as above)
    from threadpoolctl import ThreadpoolController

    return partial(ThreadpoolController().limit, limits=1, user_api="blas")
