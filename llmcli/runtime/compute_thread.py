"""Runs computing code on a separate thread, so that its OpenMP threads end with it.

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
    """Call `function` on a new thread and return its result. The thread ends after the call, and
    its OpenMP team with it. Ctrl-C takes effect only when the thread has ended.
    """
    with ThreadPoolExecutor(1, "llmcli-opening") as pool:
        return pool.submit(function).result()
