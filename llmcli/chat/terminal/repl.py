"""The REPL at a terminal: reads lines with prompt_toolkit and handles Ctrl-C, the input history and
Tab completion.
"""

import asyncio
import errno
import signal
from collections.abc import Iterable
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

from llmcli.chat.ask import FENCE
from llmcli.chat.chat_session import ChatSession
from llmcli.chat.input_loop import handle_line, is_closed
from llmcli.chat.terminal import status_line
from llmcli.chat.terminal.completion import complete_line
from llmcli.chat.terminal.hangup import discard_output, handle_hangup
from llmcli.chat.terminal.message_cost import MessageCost
from llmcli.chat.terminal.thinking_key import answer_keys
from llmcli.runtime.interrupt import defer_interrupts, pop_interrupt
from llmcli.ui import escape_controls
from quant.errors import UserError

PROMPT_TEXT, CONTINUATION_TEXT = ">>> ", "... "


def run_repl(chat: ChatSession) -> None:
    """Read lines from the terminal and handle them until Ctrl-D or /exit. A UserError in a line is
    printed. After SIGHUP or SIGTERM, raise SystemExit with 128 + the signal's number, as shells do.
    """

    def leave() -> None:
        chat.should_exit = True

    with handle_hangup(leave) as signals, defer_interrupts():
        try:
            _run_loop(chat, _open_session(chat))
        except OSError as error:  # the terminal was closed, and SIGHUP has not arrived yet
            if error.errno != errno.EIO:
                raise
            discard_output()
            signals.append(signal.SIGHUP)
        pop_interrupt()
    if signals:
        raise SystemExit(128 + signals[0])


def _run_loop(chat: ChatSession, session: PromptSession[str]) -> None:
    """Read and handle lines until the chat should exit. Ctrl-C at the prompt discards the typed
    line. Ctrl-C during an answer stops the answer. At other times it has no effect.
    """
    chat.can_prefill = True
    while not chat.should_exit:
        status_parts = status_line.status_parts(chat)
        session.bottom_toolbar = partial(_bottom_line, status_parts, MessageCost(chat))
        draft, chat.next_draft = chat.next_draft, ""
        try:
            text = asyncio.run(_read_input(session, draft))
        except KeyboardInterrupt:
            chat.ui.note("(Ctrl-D or /exit leaves)")
            continue
        except EOFError:
            return
        try:
            with answer_keys():
                handle_line(chat, _replace_surrogates(text).strip())
        except KeyboardInterrupt:
            chat.ui.note("(stopped)")
        except UserError as error:
            chat.ui.error(str(error), error.hint)


async def _read_input(session: PromptSession[str], draft: str) -> str:
    """Return the next line, which may be a message of several lines. `draft`: text with which the
    input line begins. Raises KeyboardInterrupt after Ctrl-C, and EOFError after Ctrl-D.

    A SIGINT that arrives when the line is complete is raised again, so that it stops the answer.
    prompt_toolkit's own signal handler is not used, because it loses signals just before the prompt
    begins and just after it ends.
    """
    app, loop, previous_handler = (
        session.app,
        asyncio.get_running_loop(),
        signal.getsignal(signal.SIGINT),
    )
    interrupted = False

    def handle_sigint(number: int, frame: FrameType | None) -> None:
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
        # A search in the history that a signal ended may still have the focus.
        app.layout.focus(DEFAULT_BUFFER)
        interrupted = pop_interrupt() or interrupted
        stop()

    signal.signal(signal.SIGINT, handle_sigint)
    try:
        return await session.prompt_async(
            PROMPT_TEXT,
            prompt_continuation=lambda width, number, soft: CONTINUATION_TEXT,
            default=draft,
            pre_run=begin,
            handle_sigint=False,
        )
    finally:
        signal.signal(signal.SIGINT, previous_handler)
        if interrupted:
            signal.raise_signal(signal.SIGINT)


def _bottom_line(base_parts: list[status_line.StatusPart], cost: MessageCost) -> str:
    """Return the status line for the current width of the terminal. While a message is typed, the
    line begins with its number of tokens.
    """
    cost_text = cost.describe(_replace_surrogates(get_app().current_buffer.text))
    parts = [status_line.StatusPart(-1, cost_text), *base_parts] if cost_text else base_parts
    return status_line.fit_parts(parts, get_app().output.get_size().columns, get_cwidth)


def _open_session(chat: ChatSession) -> PromptSession[str]:
    """Return the prompt_toolkit session that reads all lines of a chat."""
    history = _History(chat.config.state / "history", chat)
    return PromptSession(
        history=history,
        completer=_Commands(chat),
        complete_while_typing=False,
        multiline=True,
        key_bindings=_key_bindings(),
        enable_suspend=True,
        style=Style([("bottom-toolbar", "noreverse dim")]),
    )


def _key_bindings() -> KeyBindings:
    """Return the keys for messages of several lines: Enter and Alt-Enter."""
    keys = KeyBindings()

    @keys.add("enter", filter=~is_searching)
    def _(event: KeyPressEvent) -> None:
        # Inside a fence, Enter inserts a line break; otherwise it sends the message.
        buffer = event.current_buffer
        if is_closed(buffer.text) and buffer.text.strip() != FENCE:
            buffer.validate_and_handle()
        else:
            buffer.newline(copy_margin=False)

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys


def _replace_surrogates(text: str) -> str:
    """Replace surrogates by "?". prompt_toolkit returns surrogates for typed bytes that are not
    UTF-8.
    """
    return text.encode("utf-8", "replace").decode("utf-8")


class _History(FileHistory):
    """The input history in a file that only the user may read. If the file cannot be read or
    written, a warning is printed once and the chat continues.
    """

    def __init__(self, path: Path, chat: ChatSession) -> None:
        super().__init__(str(path))
        self.path, self.chat = path, chat

    def load_history_strings(self) -> Iterable[str]:
        try:
            return list(super().load_history_strings())
        except OSError as error:
            self.chat.warn_once(f"no history: cannot read {self.path}: {error.strerror}")
            return []

    def store_string(self, string: str) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch(mode=0o600)
            super().store_string(_replace_surrogates(string))
        except OSError as error:
            self.chat.warn_once(f"no history: cannot write {self.path}: {error.strerror}")


class _Commands(Completer):
    """Passes the completions of complete_line to prompt_toolkit."""

    def __init__(self, chat: ChatSession) -> None:
        self.chat = chat

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        for start, offer in complete_line(self.chat, document.text_before_cursor):
            yield Completion(
                offer,
                start_position=start,
                display_meta=escape_controls(getattr(offer, "description", "")),
            )
