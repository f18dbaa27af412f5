"""The keys while an answer is written: Ctrl-G ends its thinking, and no key is shown.

The terminal itself turns Ctrl-G into a signal, as it does with Ctrl-C. So no thread has to read
keys, and what the user types ahead stays in the terminal for the next input line.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from llmcli import terminal_mode
from llmcli.runtime.interrupt import THINKING_SIGNAL

THINKING_KEY = b"\x07"  # Ctrl-G


@contextmanager
def answer_keys() -> Iterator[None]:
    """While the with block runs, make Ctrl-G end the thinking of the running answer. Do not echo
    typed keys, because they would appear in the middle of the answer. They appear in the next input
    line. Without a terminal, nothing is changed.
    """
    mode = terminal_mode.read_mode()
    if mode is None or THINKING_SIGNAL is None:
        yield
        return
    # A handler is needed, so that the signal reaches on_interrupt() and does not end the program.
    previous = signal.signal(THINKING_SIGNAL, lambda number, frame: None)
    terminal_mode.set_quit_key(mode, THINKING_KEY)
    try:
        yield
    finally:
        terminal_mode.restore_mode(mode)
        signal.signal(THINKING_SIGNAL, previous)
