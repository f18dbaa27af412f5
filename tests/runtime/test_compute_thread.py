"""Opening on a compute thread, which ends with the work."""

import threading

import pytest

from llmcli.runtime.compute_thread import open_on_compute_thread


def test_work_runs_on_another_thread_that_ends_with_it() -> None:
    before = threading.active_count()
    used_thread = open_on_compute_thread(threading.current_thread)
    assert used_thread is not threading.current_thread()
    assert not used_thread.is_alive()
    assert threading.active_count() == before


def test_exceptions_are_raised_in_the_calling_thread() -> None:
    with pytest.raises(ZeroDivisionError):
        open_on_compute_thread(lambda: 1 // 0)
