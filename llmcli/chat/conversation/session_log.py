"""Writes session logs: files state/sessions/START-PID.jsonl to which every turn of a chat is
appended.

Each turn is one line, a JSON object. Its first half, with the question and the settings, is written
before the answer is generated. Its second half, the document of `run --json`, is written after the
answer. Therefore a killed process loses only the current answer. A line with a field `event`
records any other change of the conversation, such as /undo, /switch and /load.
session_log_reader.py reads the logs.
"""

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmcli.chat.conversation import turn_records
from llmcli.chat.conversation.conversation import Conversation
from llmcli.chat.conversation.turn_tree import TurnTree
from llmcli.config import Config

# The second half of the line of a question that gets no answer.
UNANSWERED = {"event": "unanswered"}


class NoSessionLog:
    """The interface of a session log. Its own methods record nothing, for chats without a log."""

    def record_question(self, question: Mapping[str, Any]) -> None:
        """Record a question and the settings, before the answer is generated."""

    def record_answer(self, answer: Mapping[str, Any], conversation: Conversation) -> None:
        """Record the answer to the question that was recorded last. Call this after the turn was
        added to the conversation.
        """

    def record_unanswered(self) -> None:
        """Record that the question that was recorded last gets no answer. Do nothing if it has been
        answered.
        """

    def record_position(self, conversation: Conversation, model: Mapping[str, str]) -> None:
        """Record the current turn, the branches and the dropped turns if they have changed. If the
        conversation has another tree than before, as after /load, record all of its turns and
        settings and `model`, the name and the server of the model.
        """

    def close(self) -> None:
        """Close the log at the end of the session."""


class SessionLog(NoSessionLog):
    """The log file of one session. If it cannot be written, `warn` is called once, and the chat
    continues without a log.

    `path`: the log of an earlier session to continue; `resume` must then be called first. Without
    `path`, a new file is created when something is first recorded.
    """

    def __init__(
        self, config: Config, warn: Callable[[str], None], path: Path | None = None
    ) -> None:
        self.path = (
            path
            or config.state / "sessions" / f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.jsonl"
        )
        self.warn = warn
        self._file = -1
        self._has_failed = False
        self._is_line_open = False  # the file ends with the first half of a line
        # The tree, number of turns and position that a reader of the log would now have.
        self._tree: TurnTree | None = None
        self._n_turns, self._position = 0, turn_records.build_position_record(TurnTree())
        # The constraint that was last written to the log. It is written only when it changes.
        self._constraint: object = ...

    def resume(self, conversation: Conversation) -> bool:
        """Open the existing log at `path`, from which `conversation` was read, to append to it.
        Return False if another process writes to it or it cannot be opened.
        """
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND)
        except OSError:
            return False
        if not _lock(self._file):
            os.close(self._file)
            self._file = -1
            return False
        self._remember_tree(conversation.tree)
        tail = _read_tail(self._file)
        # A killed process leaves the first half of a line, or only a part of the first half.
        self._is_line_open = bool(tail) and _is_json_object(tail + b"}")
        if tail and not self._is_line_open:
            self._append("\n")
        return True

    def record_question(self, question: Mapping[str, Any]) -> None:
        self.record_unanswered()
        record = {
            key: value
            for key, value in question.items()
            if key != "format" or value != self._constraint
        }
        self._constraint = question.get("format")
        if self._append(json.dumps(record, ensure_ascii=False, allow_nan=False).removesuffix("}")):
            self._is_line_open = True

    def record_answer(self, answer: Mapping[str, Any], conversation: Conversation) -> None:
        if self._is_line_open:
            dropped = sorted(conversation.tree.dropped)
            self._is_line_open = not self._append(
                _second_half(
                    {**answer, **({"left": dropped} if dropped != self._position["left"] else {})}
                )
            )
        self._remember_tree(conversation.tree)

    def record_unanswered(self) -> None:
        if self._is_line_open:
            self._is_line_open = not self._append(_second_half(UNANSWERED))

    def record_position(self, conversation: Conversation, model: Mapping[str, str]) -> None:
        tree = conversation.tree
        position = turn_records.build_position_record(tree)
        if tree is not self._tree:
            # A new session has nothing to record yet.
            if tree.turns or self._n_turns or position != self._position:
                turns = [turn_records.build_turn_record(turn) for turn in tree.turns]
                self._constraint = turn_records.build_constraint_record(conversation.constraint)
                self._append_event(
                    {
                        "event": "tree",
                        "turns": turns,
                        **position,
                        "model": model,
                        "system": conversation.system,
                        "settings": conversation.sampling.as_dict(),
                        "predict": conversation.predict,
                        "on_full": conversation.on_full,
                        "format": self._constraint,
                    }
                )
        elif position != self._position or len(tree.turns) != self._n_turns:
            turns = [turn_records.build_turn_record(turn) for turn in tree.turns[self._n_turns :]]
            self._append_event(
                {"event": "place", "first": self._n_turns + 1, "turns": turns, **position}
            )
        self._remember_tree(tree)

    def close(self) -> None:
        if self._file >= 0:
            if self._has_failed and self._is_line_open:  # the disk may have space again
                with suppress(OSError):
                    _write_whole(self._file, _second_half(UNANSWERED))
            self.record_unanswered()
            os.close(self._file)
            self._file = -1

    def _remember_tree(self, tree: TurnTree) -> None:
        """Store the tree and the position as those that the log now contains."""
        self._tree, self._n_turns, self._position = (
            tree,
            len(tree.turns),
            turn_records.build_position_record(tree),
        )

    def _append_event(self, record: dict[str, Any]) -> None:
        """Append a line with an event, after ending the line of an unanswered question."""
        self.record_unanswered()
        self._append(json.dumps(record, ensure_ascii=False) + "\n")

    def _append(self, text: str) -> bool:
        """Append text to the file. Return whether it was written completely. After the first error
        nothing is written any more.
        """
        if self._has_failed:
            return False
        try:
            if self._file < 0:
                self._open()
            _write_whole(self._file, text)
        except OSError as error:
            self._has_failed = True
            self.warn(f"this chat is not logged: cannot write {self.path}: {error.strerror}")
        return not self._has_failed

    def _open(self) -> None:
        """Create the log file, which only the user may read, and lock it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        _lock(self._file)


def end_open_lines(config: Config) -> None:
    """End the last line of every log that ends within a line, because the disk was full or the
    process was killed. Logs to which a running chat writes, and logs that cannot be changed, stay
    as they are. The modification times stay, too, because they order the sessions.
    """
    for path in (config.state / "sessions").glob("*.jsonl"):
        with suppress(OSError):
            status = path.stat()
            file = os.open(path, os.O_RDWR | os.O_APPEND)
            try:
                tail = _read_tail(file)
                if tail and _lock(file):
                    is_first_half = _is_json_object(tail + b"}")
                    _write_whole(file, _second_half(UNANSWERED) if is_first_half else "\n")
                    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
            finally:
                os.close(file)


def _read_tail(file: int) -> bytes:
    """Return the bytes after the last complete line of a log, of which at most the last
    MAX_LINE_BYTES are read.
    """
    size = os.fstat(file).st_size
    if not size or os.pread(file, 1, size - 1) == b"\n":
        return b""
    start = max(0, size - turn_records.MAX_LINE_BYTES)
    return os.pread(file, size - start, start).rpartition(b"\n")[2]


def _write_whole(file: int, text: str) -> None:
    """Append text to a log. Raises OSError if it cannot be written completely; then nothing of it
    is in the file.
    """
    raw, size = text.encode("utf-8", "surrogatepass"), os.fstat(file).st_size
    if os.write(file, raw) != len(raw):
        os.ftruncate(file, size)  # remove the part that was written
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _lock(file: int) -> bool:
    """Lock the open file against other processes. Return False if another process has the lock, and
    True if the file system does not support locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def is_in_use(path: Path) -> bool:
    """Return whether a running chat writes to this log, which it then has locked."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _lock(file)
    finally:
        os.close(file)


def _second_half(record: Mapping[str, Any]) -> str:
    """Return the second half of a line. It continues the JSON object of the first half, which was
    written without its closing brace.
    """
    return ", " + json.dumps(record, ensure_ascii=False, allow_nan=False).removeprefix("{") + "\n"


def _is_json_object(raw: bytes) -> bool:
    """Return whether the bytes are a complete JSON object."""
    try:
        return bool(turn_records.parse_line(raw))
    except turn_records.DamagedRecord:
        return False
