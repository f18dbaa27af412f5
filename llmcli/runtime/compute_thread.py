"""Run code that computes on a separate thread.

OpenMP keeps a team of threads for each thread that has computed, as long as that thread lives. When
all teams together have more threads than there are processors, libgomp puts waiting threads to
sleep between any two operations of a graph instead of letting them spin, which slows down every
later pass.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def open_on_compute_thread(function: Callable[[], T]) -> T:
    """Return what `function` returns, run on a new thread that ends with it, together with its
    OpenMP team. Ctrl-C waits for the thread.
    """
    with ThreadPoolExecutor(1, "llmcli-opening") as pool:
        return pool.submit(function).result()
