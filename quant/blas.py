"""numpy's BLAS has threads of its own, as many as there are cores, of which llama.cpp's -t knows
nothing.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any


def bounded(threads: int | None) -> AbstractContextManager[object]:
    """Matrix products inside the block take at most as many threads; None leaves them all cores."""
    if threads is None:
        return nullcontext()
    limits: AbstractContextManager[object] = _pools().limit(limits=threads, user_api="blas")
    return limits


def one_thread() -> None:
    """From now on products take the thread that asks for them, and no more: the encoders are the
    threads.
    """
    _numpys().limit(limits=1, user_api="blas")


def _pools() -> Any:
    """All that are loaded by now."""
    import numpy as np  # noqa: F401 (what is not loaded yet is not found)
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


@cache
def _numpys() -> Any:
    """Looked for once: it is asked for each tensor."""
    return _pools()
