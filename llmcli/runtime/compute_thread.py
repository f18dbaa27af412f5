"""Run a computation on a separate thread, so that its OpenMP threads end with the thread.

Each thread that has computed owns a team of OpenMP threads as long as it lives. When all teams
together have more threads than the machine has processors, libgomp lets idle threads sleep between
the operations of a graph instead of spinning. This slows down every later forward pass.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def open_on_compute_thread(function: Callable[[], T]) -> T:
    """Call `function` on a new thread and return its result. The thread and its OpenMP threads end
    after the call. Ctrl-C takes effect only then.
    """
    with ThreadPoolExecutor(1, "llmcli-opening") as pool:
        return pool.submit(function).result()
