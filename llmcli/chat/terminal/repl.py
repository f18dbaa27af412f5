"""The REPL at a terminal: prompt, keys, history, completion, Ctrl-C."""

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
from llmcli.runtime.interrupt import defer_interrupts, pop_interrupt
from llmcli.ui import visible
from quant.errors import UserError

PROMPT, CONTINUED = ">>> ", "... "


def converse(chat: Talk) -> None:
    """Read lines and handle them until Ctrl-D or /exit. User errors are printed.

    Raises SystemExit(128 + signal) after SIGHUP and SIGTERM, as a shell does.
    """

    def leave() -> None:
        chat.leaving = True

    with on_hangup(leave) as signals, defer_interrupts():
        try:
            _converse(chat, _session(chat))
        except OSError as error:  # the terminal is closed, and its signal has not arrived yet
            if error.errno != errno.EIO:
                raise
            silence()
            signals.append(signal.SIGHUP)
        pop_interrupt()
    if signals:
        raise SystemExit(128 + signals[0])


def _converse(chat: Talk, session: PromptSession[str]) -> None:
    """Run the input loop.

    Ctrl-C reaches the prompt as a key and an answer through `on_interrupt`; between them it has no
    effect.
    """
    chat.prefills = True
    while not chat.leaving:
        status_parts = status_line.parts(chat)
        session.bottom_toolbar = partial(_bottom, status_parts, Cost(chat))
        draft, chat.draft = chat.draft, ""
        try:
            text = asyncio.run(_typed(session, draft))
        except KeyboardInterrupt:
            chat.ui.note("(Ctrl-D or /exit leaves)")
            continue
        except EOFError:
            return
        try:
            with _no_echo():
                say(chat, _proper(text).strip())
        except KeyboardInterrupt:
            chat.ui.note("(stopped)")
        except UserError as error:
            chat.ui.error(str(error), error.hint)


async def _typed(session: PromptSession[str], draft: str) -> str:
    """Read one message or command.

    Ctrl-C as a signal ends it as the key does. A Ctrl-C after the message is complete applies to
    the answer. prompt_toolkit's own handler is not used: it fails just before the prompt begins and
    just after it ends.
    """
    app, loop, previous_handler = (
        session.app,
        asyncio.get_running_loop(),
        signal.getsignal(signal.SIGINT),
    )
    interrupted = False

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        loop.call_soon_threadsafe(stop)

    def stop() -> None:
        nonlocal interrupted
        if interrupted and app.future and not app.future.done():
            interrupted = False
            app.exit(exception=KeyboardInterrupt, style="class:aborting")

    def begin() -> None:
        nonlocal interrupted
        app.layout.focus(DEFAULT_BUFFER)  # a search ended by a signal would keep the focus
        interrupted = pop_interrupt() or interrupted
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
        signal.signal(signal.SIGINT, previous_handler)
        if interrupted:
            signal.raise_signal(signal.SIGINT)


def _bottom(told: list[status_line.Part], cost: Cost) -> str:
    """Return the bottom line for the terminal's current width.

    While a message is typed, the line begins with its cost.
    """
    cost_text = cost.line(_proper(get_app().current_buffer.text))
    parts = [status_line.Part(-1, cost_text), *told] if cost_text else told
    return status_line.fit(parts, get_app().output.get_size().columns, get_cwidth)


def _session(chat: Talk) -> PromptSession[str]:
    history = _History(chat.config.state / "history", chat)
    return PromptSession(
        history=history,
        completer=_Commands(chat),
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
        # Inside a fence, Enter inserts a line break; otherwise it sends the message.
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
    """Keep keys typed during an answer out of the output; they appear at the next prompt."""
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
    """Replace the surrogates that prompt_toolkit makes of bytes that are not UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")


class _History(FileHistory):
    """An input history readable by the user only. Disk errors are reported once."""

    def __init__(self, path: Path, chat: Talk) -> None:
        super().__init__(str(path))
        self.path, self.chat = path, chat

    def load_history_strings(self) -> Iterable[str]:
        try:
            return list(super().load_history_strings())
        except OSError as error:
            self.chat.tell_once(f"no history: cannot read {self.path}: {error.strerror}")
            return []

    def store_string(self, string: str) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch(mode=0o600)
            super().store_string(_proper(string))
        except OSError as error:
            self.chat.tell_once(f"no history: cannot write {self.path}: {error.strerror}")


class _Commands(Completer):
    """Passes Tab completion to complete.py."""

    def __init__(self, chat: Talk) -> None:
        self.chat = chat

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        for start, offer in offers(self.chat, document.text_before_cursor):
            yield Completion(
                offer, start_position=start, display_meta=visible(getattr(offer, "about", ""))
            )
