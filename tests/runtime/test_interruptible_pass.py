"""Ctrl-C during passes takes effect at once, at the next pass, or at the end."""

import os
import signal
import threading

import pytest

from llmcli.runtime.binding.contexts.context import Aborted
from llmcli.runtime.interruptible_pass import interruptible


class FakeContext:
    """A context whose pass is aborted by the interrupt number `needed`, because earlier interrupts
    do not reach a running pass.
    """

    def __init__(self, needed: int) -> None:
        self.needed, self.n_interrupts, self.aborted = needed, 0, threading.Event()

    def interrupt(self) -> None:
        self.n_interrupts += 1
        if self.n_interrupts >= self.needed:
            self.aborted.set()

    def run(self) -> None:
        assert self.aborted.wait(20), "the pass was not interrupted"
        raise Aborted


@pytest.mark.parametrize("needed", [1, 3])
def test_ctrl_c_is_repeated_until_a_pass_is_aborted(needed: int) -> None:
    context = FakeContext(needed)

    def measure() -> None:
        with interruptible(context):
            os.kill(os.getpid(), signal.SIGINT)
            context.run()

    with pytest.raises(KeyboardInterrupt):
        measure()


def test_ctrl_c_in_the_last_pass_is_raised_after_it() -> None:
    context, finished = FakeContext(1), []

    def measure() -> None:
        with interruptible(context):
            os.kill(os.getpid(), signal.SIGINT)
            finished.append(context.aborted.wait(20))

    with pytest.raises(KeyboardInterrupt):
        measure()
    assert finished == [True]


def test_without_ctrl_c_nothing_is_interrupted() -> None:
    context = FakeContext(1)
    with interruptible(context):
        pass
    assert not context.n_interrupts
