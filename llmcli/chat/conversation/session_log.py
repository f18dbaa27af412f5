"""Session logs: state/sessions/START-PID.jsonl, append-only.

Each answer is one line. The first half of the line contains the question and the settings, and is
written before the answer; the second half is the document of `run --json`. A killed process
therefore loses only the current answer. A line with an `event` records any other change of the
position (/undo, /switch, /load, …). session_log_reader.py reads the logs.
"""

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llmcli.chat.conversation import turn_records
from llmcli.chat.conversation.conversation import Conversation
from llmcli.chat.conversation.turn_tree import TurnTree
from llmcli.config import Config


class NoSessionLog:
    """A log that records nothing; the base class of the session log."""

    def record_question(self, question: Mapping[str, Any]) -> None:
        """Record a question that is about to be answered."""

    def record_answer(self, answer: Mapping[str, Any], conversation: Conversation) -> None:
        """Record the answer, after it was added to the conversation."""

    def record_unanswered(self) -> None:
        """Record that the pending question has no answer; do nothing without one."""

    def record_position(self, conversation: Conversation, model: str) -> None:
        """Record the position in the tree if it has changed.

        If the conversation has another tree than before, all of its turns and settings are
        recorded, with the name of the model.
        """

    def close(self) -> None:
        """Close the log at the end of the session."""


class SessionLog(NoSessionLog):
    """The log of one session. If it cannot be written, a warning is printed once and the chat
    continues.

    Without `path`, a new file is created for the first record. With the `path` of an earlier
    session's log, call `resume` first.
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
        self._broken = self._half = False
        # the tree, turn count and position that a reader of the log would have at this point
        self._tree: TurnTree | None = None
        self._n_turns, self._position = 0, turn_records.build_position_record(TurnTree())
        # the last constraint in the log; it is written again only when it changes
        self._constraint: object = ...

    def resume(self, conversation: Conversation) -> bool:
        """Continue the log at `path`, from which the conversation was read.

        Returns False if another process writes that log, or if it cannot be opened.
        """
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND)
        except OSError:
            return False
        if not _lock(self._file):
            os.close(self._file)
            self._file = -1
            return False
        self._remember(conversation.tree)
        tail = os.pread(self._file, os.fstat(self._file).st_size, 0).rpartition(b"\n")[2]
        # A killed process leaves the first half of a line, or a part of that half.
        self._half = bool(tail) and _is_json_object(tail + b"}")
        if tail and not self._half:
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
        self._half = self._append(
            json.dumps(record, ensure_ascii=False, allow_nan=False).removesuffix("}")
        )

    def record_answer(self, answer: Mapping[str, Any], conversation: Conversation) -> None:
        if self._half:
            dropped = sorted(conversation.tree.dropped)
            self._append(
                _second_half(
                    {**answer, **({"left": dropped} if dropped != self._position["left"] else {})}
                )
            )
            self._half = False
        self._remember(conversation.tree)

    def record_unanswered(self) -> None:
        if self._half:
            self._append(_second_half({"event": "unanswered"}))
            self._half = False

    def record_position(self, conversation: Conversation, model: str) -> None:
        tree = conversation.tree
        position = turn_records.build_position_record(tree)
        if tree is not self._tree:
            # A new session has nothing to record yet.
            if tree.turns or self._n_turns or position != self._position:
                turns = [turn_records.build_turn_record(turn) for turn in tree.turns]
                self._constraint = turn_records.build_constraint_record(conversation.constraint)
                self._event(
                    {
                        "event": "tree",
                        "turns": turns,
                        **position,
                        "model": {"name": model},
                        "system": conversation.system,
                        "settings": conversation.sampling.as_dict(),
                        "predict": conversation.predict,
                        "on_full": conversation.on_full,
                        "format": self._constraint,
                    }
                )
        elif position != self._position or len(tree.turns) != self._n_turns:
            turns = [turn_records.build_turn_record(turn) for turn in tree.turns[self._n_turns :]]
            self._event({"event": "place", "first": self._n_turns + 1, "turns": turns, **position})
        self._remember(tree)

    def close(self) -> None:
        if self._file >= 0:
            self.record_unanswered()
            os.close(self._file)
            self._file = -1

    def _remember(self, tree: TurnTree) -> None:
        self._tree, self._n_turns, self._position = (
            tree,
            len(tree.turns),
            turn_records.build_position_record(tree),
        )

    def _event(self, record: dict[str, Any]) -> None:
        self.record_unanswered()
        self._append(json.dumps(record, ensure_ascii=False) + "\n")

    def _append(self, text: str) -> bool:
        """Append text to the file; return whether all of it was written.

        After the first error, nothing more is written.
        """
        if self._broken:
            return False
        raw = text.encode("utf-8", "surrogatepass")
        try:
            if self._file < 0:
                self._open()
            before = os.fstat(self._file).st_size
            if os.write(self._file, raw) != len(raw):
                os.ftruncate(self._file, before)  # leave no partial text
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._broken = True
            self.warn(f"this chat is not logged: cannot write {self.path}: {error.strerror}")
        return not self._broken

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # readable by the user only
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        _lock(self._file)


def _lock(file: int) -> bool:
    """Lock the file for writing; return False if another process has the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def is_in_use(path: Path) -> bool:
    """Return whether a running chat writes this log."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _lock(file)
    finally:
        os.close(file)


def _second_half(record: Mapping[str, Any]) -> str:
    """Return the second half of a line; the first half lacks only its closing brace."""
    return ", " + json.dumps(record, ensure_ascii=False, allow_nan=False).removeprefix("{") + "\n"


def _is_json_object(raw: bytes) -> bool:
    """Return whether `raw` is a JSON object."""
    try:
        return isinstance(json.loads(raw), dict)
    except ValueError:
        return False
