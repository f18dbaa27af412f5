"""Which thread computes: OpenMP keeps a team of threads for each that ever did, as long as that one
lives.

Where all teams together have more threads than there are processors, libgomp lets those that wait
go to sleep between any two operations of a graph (its throttled spin count) instead of watching for
the next. 2026-11-22, SmolLM2-135M with two threads on two cores: opened on the main thread and
answering on another 98 to 111 tokens a second; all on one thread, or opened on one that has ended,
129 to 166.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def on_a_thread(function: Callable[[], T]) -> T:
    """What `function` returns, run on a thread that ends with it, its team too; a Ctrl-C waits for
    that.
    """
    with ThreadPoolExecutor(1, "llmcli-opening") as pool:
        return pool.submit(function).result()
