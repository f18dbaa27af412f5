"""The record of a sitting: state/sessions/START-PID.jsonl, appended to as things happen and never
rewritten.

A reply is one line, `run --json`'s document and what led to it; its first half, with the question,
is written before the answer is made. So a process that is killed loses at most the answer it was
at. Where the conversation goes otherwise than on (/undo, /switch, /load, …) a line with an `event`
says so. What is made of it again is sitting.py's.
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
from llmcli.chat.conversation.conversation import Session
from llmcli.chat.conversation.turn_tree import Tree
from llmcli.config import Config


class NoLog:
    """Keeps nothing."""

    def asked(self, head: Mapping[str, Any]) -> None:
        """A question is about to be answered."""

    def answered(self, rest: Mapping[str, Any], session: Session) -> None:
        """The answer to it, which the conversation has taken up by now."""

    def missed(self) -> None:
        """No answer came of it; nothing where there was one."""

    def moved(self, session: Session, model: str) -> None:
        """The conversation, now with that model, may be somewhere else."""

    def close(self) -> None:
        """The sitting is over."""


class Log(NoLog):
    """The log of one sitting; a disk that does not take it is told once and the chat goes on.

    `path` goes on with the log of a sitting before, whose conversation the session already has;
    where another process is at it, a new one begins.
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
        # The tree as a reader of the log has it: which one, how many of its turns, and the place in
        # it.
        self._tree: Tree | None = None
        self._turns, self._place = 0, turn_records.place_record(Tree())
        self._form: object = ...  # as a reader has it, too; told where it is another

    def resume(self, session: Session) -> bool:
        """Go on with `path`, of which the session was made; False where another process writes it,
        or nobody can.
        """
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND)
        except OSError:
            return False
        if not _lock(self._file):
            os.close(self._file)
            self._file = -1
            return False
        self._know(session.tree)
        tail = os.pread(self._file, os.fstat(self._file).st_size, 0).rpartition(b"\n")[2]
        self._half = bool(tail) and _whole(
            tail + b"}"
        )  # what a kill has left: the first half of a line, or less
        if tail and not self._half:
            self._append("\n")
        return True

    def asked(self, head: Mapping[str, Any]) -> None:
        self.missed()
        told = {key: value for key, value in head.items() if key != "format" or value != self._form}
        self._form = head.get("format")
        self._half = self._append(
            json.dumps(told, ensure_ascii=False, allow_nan=False).removesuffix("}")
        )

    def answered(self, rest: Mapping[str, Any], session: Session) -> None:
        if self._half:
            left = sorted(session.tree.left)
            self._append(_rest({**rest, **({"left": left} if left != self._place["left"] else {})}))
            self._half = False
        self._know(session.tree)

    def missed(self) -> None:
        if self._half:
            self._append(_rest({"event": "unanswered"}))
            self._half = False

    def moved(self, session: Session, model: str) -> None:
        tree = session.tree
        place = turn_records.place_record(tree)
        if tree is not self._tree:
            if (
                tree.turns or self._turns or place != self._place
            ):  # a sitting that begins has nothing to tell
                turns = [turn_records.turn_record(turn) for turn in tree.turns]
                self._form = turn_records.form_record(session.constraint)
                self._event(
                    {
                        "event": "tree",
                        "turns": turns,
                        **place,
                        "model": {"name": model},
                        "system": session.system,
                        "settings": session.sampling.as_dict(),
                        "predict": session.predict,
                        "on_full": session.on_full,
                        "format": self._form,
                    }
                )
        elif place != self._place or len(tree.turns) != self._turns:
            turns = [turn_records.turn_record(turn) for turn in tree.turns[self._turns :]]
            self._event({"event": "place", "first": self._turns + 1, "turns": turns, **place})
        self._know(tree)

    def close(self) -> None:
        if self._file >= 0:
            self.missed()
            os.close(self._file)
            self._file = -1

    def _know(self, tree: Tree) -> None:
        self._tree, self._turns, self._place = (
            tree,
            len(tree.turns),
            turn_records.place_record(tree),
        )

    def _event(self, record: dict[str, Any]) -> None:
        self.missed()
        self._append(json.dumps(record, ensure_ascii=False) + "\n")

    def _append(self, text: str) -> bool:
        """On its way to the disk before the next prompt; whether all of it is."""
        if self._broken:
            return False
        raw = text.encode("utf-8", "surrogatepass")
        try:
            if self._file < 0:
                self._open()
            before = os.fstat(self._file).st_size
            if os.write(self._file, raw) != len(raw):
                os.ftruncate(self._file, before)  # no half words
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._broken = True
            self.warn(f"this chat is not recorded: cannot write {self.path}: {error.strerror}")
        return not self._broken

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # What people say to a model is theirs alone.
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        _lock(self._file)


def _lock(file: int) -> bool:
    """Say that this process writes the file; False where another one does."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def busy(path: Path) -> bool:
    """Whether a running chat writes this log."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _lock(file)
    finally:
        os.close(file)


def _rest(record: Mapping[str, Any]) -> str:
    return ", " + json.dumps(record, ensure_ascii=False, allow_nan=False).removeprefix("{") + "\n"


def _whole(raw: bytes) -> bool:
    try:
        return isinstance(json.loads(raw), dict)
    except ValueError:
        return False
