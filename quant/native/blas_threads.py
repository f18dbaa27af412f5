"""Limits the threads of numpy's BLAS. By default BLAS uses every core, even if the user limits the
threads with -t.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any


def limit_threads(threads: int | None) -> AbstractContextManager[object]:
    """Return a context in which matrix products use at most `threads` threads; None means no
    limit.
    """
    if threads is None:
        return nullcontext()
    limits: AbstractContextManager[object] = _thread_pools().limit(limits=threads, user_api="blas")
    return limits


def use_one_thread() -> None:
    """Limit matrix products to the calling thread from now on. Encoders call this, because they
    already run on several threads.
    """
    _cached_pools().limit(limits=1, user_api="blas")


def _thread_pools() -> Any:
    """Return a controller of the thread pools of all loaded libraries."""
    import numpy as np  # noqa: F401 (a library is found only once it is loaded)
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


@cache
def _cached_pools() -> Any:
    """Return the controller of thread pools, which is created once: it takes a while, and is needed
    for each tensor.
    """
    return _thread_pools()
