"""Ctrl-C during passes is handled at once, at the next pass, or at the end."""

import os
import signal
import threading

import pytest

from llmcli.runtime.binding.context import Aborted
from llmcli.runtime.interruptible_pass import interruptible


class Pass:
    """A context of which only the running pass is told; `asked` counts."""

    def __init__(self, notices: int) -> None:
        self.notices, self.asked, self.heard = notices, 0, threading.Event()

    def interrupt(self) -> None:
        self.asked += 1
        if self.asked >= self.notices:
            self.heard.set()

    def run(self) -> None:
        assert self.heard.wait(20), "nobody asked"
        raise Aborted


@pytest.mark.parametrize("notices", [1, 3])
def test_a_pass_that_did_not_notice_is_followed_by_one_that_does(notices: int) -> None:
    context = Pass(notices)

    def measure() -> None:
        with interruptible(context):
            os.kill(os.getpid(), signal.SIGINT)
            context.run()

    with pytest.raises(KeyboardInterrupt):
        measure()


def test_ctrl_c_in_the_last_pass_raises_behind_it() -> None:
    context, through = Pass(1), []

    def measure() -> None:
        with interruptible(context):
            os.kill(os.getpid(), signal.SIGINT)
            through.append(context.heard.wait(20))

    with pytest.raises(KeyboardInterrupt):
        measure()
    assert through == [True]


def test_nothing_happens_where_nobody_presses() -> None:
    context = Pass(1)
    with interruptible(context):
        pass
    assert not context.asked
