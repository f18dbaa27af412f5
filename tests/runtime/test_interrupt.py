"""Ctrl-C while C code runs."""

import signal
import threading

import pytest

from llmcli.runtime.binding.model import open_model
from llmcli.runtime.interrupt import allow_interrupts, defer_interrupts, on_interrupt


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


def test_a_waiting_ctrl_c_ends_what_begins_next():
    heard = threading.Event()
    with defer_interrupts():
        signal.raise_signal(signal.SIGINT)
        with on_interrupt(heard.set):
            assert heard.is_set()


def test_a_waiting_ctrl_c_that_nobody_took_is_raised_at_the_end():
    done = []
    with pytest.raises(KeyboardInterrupt), defer_interrupts():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        done.append("all of it")
    assert done == ["all of it"]
    with defer_interrupts():
        pass  # it is told once
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_stretch_that_can_be_left_anywhere_is_left_at_once():
    done = []
    with pytest.raises(KeyboardInterrupt), defer_interrupts():  # noqa: PT012
        with allow_interrupts():
            signal.raise_signal(signal.SIGINT)
            done.append("never")
    with pytest.raises(KeyboardInterrupt), defer_interrupts():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        with allow_interrupts():
            done.append("never")
    assert done == []


def test_ctrl_c_while_a_model_is_loaded_frees_it(stories_gguf):
    with pytest.raises(KeyboardInterrupt), defer_interrupts():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        with open_model(stories_gguf):
            raise AssertionError("it was not to be opened")
    with open_model(stories_gguf) as model:
        assert model.n_vocab == 512
