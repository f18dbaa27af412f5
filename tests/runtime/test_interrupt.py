"""Ctrl-C while C code runs."""

import signal
import threading

from llmcli.runtime.interrupt import on_interrupt


def test_ctrl_c_is_still_heard_after_another_signal():
    heard = threading.Event()
    old = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with on_interrupt(heard.set):
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGINT)
            assert heard.wait(120)
    finally:
        signal.signal(signal.SIGUSR1, old)
