"""The terminal: prompt, keys, history, completion, Ctrl-C. The only door to prompt_toolkit.

What a line means is loop.py's; what an answer looks like is render.py's.
"""

import asyncio
import errno
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import is_searching
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.styles import Style
from prompt_toolkit.utils import get_cwidth

from llmcli import terminal_mode
from llmcli.chat.ask import FENCE
from llmcli.chat.chat_session import Talk
from llmcli.chat.input_loop import closed, say
from llmcli.chat.terminal import status_line
from llmcli.chat.terminal.completion import offers
from llmcli.chat.terminal.hangup import on_hangup, silence
from llmcli.chat.terminal.message_cost import Cost
from llmcli.runtime.interrupt import interrupt_taken, interrupts_wait
from llmcli.ui import visible
from quant.errors import Refusal

PROMPT, CONTINUED = ">>> ", "... "


def converse(talk: Talk) -> None:
    """Read, answer, until Ctrl-D or /exit. A user's mistake is told and the talk goes on.

    Raises SystemExit(128 + signal) after SIGHUP and SIGTERM, as a shell counts.
    """

    def leave() -> None:
        talk.leaving = True

    with on_hangup(leave) as came, interrupts_wait():
        try:
            _converse(talk, _session(talk))
        except OSError as error:  # the screen is gone, and its signal is still on the way
            if error.errno != errno.EIO:
                raise
            silence()
            came.append(signal.SIGHUP)
        interrupt_taken()
    if came:
        raise SystemExit(128 + came[0])


def _converse(talk: Talk, session: PromptSession[str]) -> None:
    """The turns. Ctrl-C reaches the prompt as a key, an answer through `on_interrupt`, and nothing
    between them.
    """
    talk.prefills = True
    while not talk.leaving:
        told = status_line.parts(talk)
        session.bottom_toolbar = partial(_bottom, told, Cost(talk))
        draft, talk.draft = talk.draft, ""
        try:
            text = asyncio.run(_typed(session, draft))
        except KeyboardInterrupt:
            talk.ui.note("(Ctrl-D or /exit leaves)")
            continue
        except EOFError:
            return
        try:
            with _no_echo():
                say(talk, _proper(text).strip())
        except KeyboardInterrupt:
            talk.ui.note("(stopped)")
        except Refusal as error:
            talk.ui.error(str(error), error.hint)


async def _typed(session: PromptSession[str], draft: str) -> str:
    """One message or command. Ctrl-C as a signal ends it as the key does, whenever it comes; one
    that comes when the message is there already waits for the answer.

    (prompt_toolkit's own handler fails where the prompt has not quite begun, or has just ended.)
    """
    app, loop, waits = session.app, asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)
    came = False

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        loop.call_soon_threadsafe(stop)

    def stop() -> None:
        nonlocal came
        if came and app.future and not app.future.done():
            came = False
            app.exit(exception=KeyboardInterrupt, style="class:aborting")

    def begin() -> None:
        nonlocal came
        app.layout.focus(
            DEFAULT_BUFFER
        )  # a search that a signal ended would keep the keys to itself
        came = interrupt_taken() or came
        stop()

    signal.signal(signal.SIGINT, hear)
    try:
        return await session.prompt_async(
            PROMPT,
            prompt_continuation=lambda width, number, soft: CONTINUED,
            default=draft,
            pre_run=begin,
            handle_sigint=False,
        )
    finally:
        signal.signal(signal.SIGINT, waits)
        if came:
            signal.raise_signal(signal.SIGINT)


def _bottom(told: list[status_line.Part], cost: Cost) -> str:
    """The line at the bottom, as wide as the terminal is now; while a message is typed it begins
    with its cost.
    """
    spent = cost.line(_proper(get_app().current_buffer.text))
    parts = [status_line.Part(-1, spent), *told] if spent else told
    return status_line.fit(parts, get_app().output.get_size().columns, get_cwidth)


def _session(talk: Talk) -> PromptSession[str]:
    history = _History(talk.config.state / "history", talk)
    return PromptSession(
        history=history,
        completer=_Commands(talk),
        complete_while_typing=False,
        multiline=True,
        key_bindings=_keys(),
        enable_suspend=True,
        style=Style([("bottom-toolbar", "noreverse dim")]),
    )


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter", filter=~is_searching)
    def _(event: KeyPressEvent) -> None:
        # Inside a fence Enter is a new line; everywhere else it sends.
        buffer = event.current_buffer
        if closed(buffer.text) and buffer.text.strip() != FENCE:
            buffer.validate_and_handle()
        else:
            buffer.newline(copy_margin=False)

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys


@contextmanager
def _no_echo() -> Iterator[None]:
    """Keys typed into an answer wait for the next prompt instead of standing in the middle of the
    text.
    """
    before = terminal_mode.settings()
    if before is None:
        yield
        return
    terminal_mode.hush(before)
    try:
        yield
    finally:
        terminal_mode.restore(before)


def _proper(text: str) -> str:
    """Typed text without the halves of characters that prompt_toolkit makes of bytes that are not
    UTF-8.
    """
    return text.encode("utf-8", "replace").decode("utf-8")


class _History(FileHistory):
    """A history file that is the user's alone; a disk that does not take it is told once."""

    def __init__(self, path: Path, talk: Talk) -> None:
        super().__init__(str(path))
        self.path, self.talk = path, talk

    def load_history_strings(self) -> Iterable[str]:
        try:
            return list(super().load_history_strings())
        except OSError as error:
            self.talk.tell_once(f"no history: cannot read {self.path}: {error.strerror}")
            return []

    def store_string(self, string: str) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch(mode=0o600)
            super().store_string(_proper(string))
        except OSError as error:
            self.talk.tell_once(f"no history: cannot write {self.path}: {error.strerror}")


class _Commands(Completer):
    """What complete.py offers."""

    def __init__(self, talk: Talk) -> None:
        self.talk = talk

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        for start, offer in offers(self.talk, document.text_before_cursor):
            yield Completion(
                offer, start_position=start, display_meta=visible(getattr(offer, "about", ""))
            )
