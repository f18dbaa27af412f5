"""Ctrl-C while C code is running."""

import signal
import threading

import pytest

from llmcli.runtime.binding.model import open_model
from llmcli.runtime.interrupt import allow_interrupts, defer_interrupts, on_interrupt


def test_ctrl_c_is_handled_after_another_signal():
    interrupted = threading.Event()
    old = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with on_interrupt(interrupted.set):
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGINT)
            assert interrupted.wait(120)
    finally:
        signal.signal(signal.SIGUSR1, old)


def test_a_deferred_ctrl_c_interrupts_the_next_work():
    interrupted = threading.Event()
    with defer_interrupts():
        signal.raise_signal(signal.SIGINT)
        with on_interrupt(interrupted.set):
            assert interrupted.is_set()


def test_a_deferred_ctrl_c_is_raised_at_the_end():
    done = []
    with pytest.raises(KeyboardInterrupt), defer_interrupts():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        done.append("all of it")
    assert done == ["all of it"]
    with defer_interrupts():
        pass  # it is raised only once
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_is_raised_at_once_where_interrupts_are_allowed():
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
            raise AssertionError("the model was opened")
    with open_model(stories_gguf) as model:
        assert model.n_vocab == 512
