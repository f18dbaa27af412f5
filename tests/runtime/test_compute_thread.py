"""Work on a thread that ends when the work ends."""

import threading

import pytest

from llmcli.runtime.compute_thread import open_on_compute_thread


def test_it_runs_elsewhere_and_nobody_is_left() -> None:
    before = threading.active_count()
    ran = open_on_compute_thread(threading.current_thread)
    assert ran is not threading.current_thread()
    assert not ran.is_alive()
    assert threading.active_count() == before


def test_what_it_raises_is_raised_here() -> None:
    with pytest.raises(ZeroDivisionError):
        open_on_compute_thread(lambda: 1 // 0)
