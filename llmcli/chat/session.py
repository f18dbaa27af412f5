"""A conversation and its settings, what is kept of it on the disk, and nothing about models or screens.

Every reply is appended at once to state/sessions/START-PID.jsonl; /save and /load keep named
conversations in state/saved/NAME.jsonl, written whole or not at all.
"""

import errno
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmcli.catalog.partial import write_whole
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.runtime.sampling import Sampling
from llmcli.runtime.search import NO_SEARCH, Search
from llmcli.types import Finish, Message

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
ROLES = ("user", "assistant")


@dataclass(slots=True)
class Session:
    """What the next answer depends on. `messages` are user and assistant in turn; the system text
    stands apart because templates differ in how they take it. `predict` None: no limit. `search` holds
    where it has more than one beam, `sampling` otherwise."""

    sampling: Sampling
    system: str | None = None
    predict: int | None = None
    search: Search = NO_SEARCH
    messages: list[Message] = field(default_factory=list)
    cut: set[int] = field(default_factory=set)  # indices of answers that were stopped half way

    def add(self, text: str, answer: str, finish: Finish) -> None:
        """Keep one turn."""
        self.messages += [Message("user", text), Message("assistant", answer)]
        if finish == "cancelled":
            self.cut.add(len(self.messages) - 1)

    def undo(self) -> str | None:
        """Take the last turn back; its question, None where there is none."""
        if len(self.messages) < 2:
            return None
        self.cut.discard(len(self.messages) - 1)
        question = self.messages[-2].content
        del self.messages[-2:]
        return question

    def clear(self) -> None:
        """Forget the messages; system text and settings stay."""
        self.messages.clear()
        self.cut.clear()


class Log:
    """The append-only record of one sitting; a disk that does not take it is told once and the chat goes on."""

    def __init__(self, config: Config, warn: Callable[[str], None]) -> None:
        self.path = config.state / "sessions" / f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.jsonl"
        self.warn = warn
        self._broken = False

    def append(self, record: dict[str, Any]) -> None:
        """One line, on its way to the disk before the next prompt."""
        if self._broken:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
            # What people say to a model is theirs alone.
            with os.fdopen(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab", 0) as file:
                before, raw = file.tell(), line.encode("utf-8", "surrogatepass")
                if file.write(raw) != len(raw):
                    file.truncate(before)  # no half lines
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._broken = True
            self.warn(f"this chat is not recorded: cannot write {self.path}: {error.strerror}")


def saved_names(config: Config) -> list[str]:
    """The names of saved conversations."""
    return sorted(path.stem for path in (config.state / "saved").glob("*.jsonl"))


def save(session: Session, config: Config, name: str, model: str) -> tuple[Path, bool]:
    """Write the conversation as `name`: its file, and whether one of that name was replaced."""
    path = _path(config, name)
    head = {
        "chat": 1, "model": model, "system": session.system, "predict": session.predict,
        "settings": session.sampling.as_dict(),
    }  # fmt: skip
    lines: list[dict[str, Any]] = [head]
    for index, message in enumerate(session.messages):
        line = {"role": message.role, "content": message.content}
        lines.append({**line, "cut": True} if index in session.cut else line)
    replaced = path.exists()
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    write_whole(path, text.encode("utf-8", "surrogatepass"), mode=0o600)  # what people say is theirs alone
    return path, replaced


def load(session: Session, config: Config, name: str) -> str:
    """Fill `session` from a saved one; the model it was held with. On an error nothing changes."""
    path = _path(config, name)
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        known = ", ".join(saved_names(config))
        hint = f"there are: {known}" if known else "/save NAME makes one"
        raise UserError(f"no saved chat called {name!r}", hint=hint) from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    head, *rest = [_line(path, number, raw) for number, raw in enumerate(lines, 1)] or [{}]
    if head.get("chat") != 1 or not isinstance(head.get("settings"), dict):
        raise _damaged(path, 1, "it is not the head of a saved chat")
    fresh = Session(session.sampling.with_values(head["settings"]), head.get("system"), head.get("predict"))
    if not isinstance(fresh.system, str | None) or not isinstance(fresh.predict, int | None):
        raise _damaged(path, 1, "system or predict has the wrong type")
    for number, line in enumerate(rest, 2):
        role, content = line.get("role"), line.get("content")
        if role != ROLES[len(fresh.messages) % 2] or not isinstance(content, str):
            raise _damaged(path, number, f"expected a message of the {ROLES[len(fresh.messages) % 2]}")
        if line.get("cut"):
            fresh.cut.add(len(fresh.messages))
        fresh.messages.append(Message(role, content))
    if len(fresh.messages) % 2:
        raise _damaged(path, len(lines), "the last answer is missing")
    session.sampling, session.system, session.predict = fresh.sampling, fresh.system, fresh.predict
    session.messages, session.cut = fresh.messages, fresh.cut
    return str(head.get("model", ""))


def _line(path: Path, number: int, raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8", "surrogatepass"))
    except (UnicodeDecodeError, ValueError):
        raise _damaged(path, number, "it is not JSON") from None
    if not isinstance(value, dict):
        raise _damaged(path, number, "it is not a JSON object")
    return value


def _damaged(path: Path, number: int, reason: str) -> UserError:
    hint = f"correct that line of {path}, or /load another chat"
    return UserError(f"{path}: line {number} is damaged: {reason}", hint=hint)


def _path(config: Config, name: str) -> Path:
    if not NAME.fullmatch(name):
        raise UserError(f"{name!r} cannot name a chat", hint="use letters, digits and . _ - (at most 100)")
    return config.state / "saved" / f"{name}.jsonl"
