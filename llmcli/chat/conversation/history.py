"""The stored conversations: saved chats by name, and session logs by their start time."""

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from llmcli.chat.conversation import saved_chats, session_log_reader
from llmcli.chat.conversation.session_log import busy
from llmcli.chat.conversation.stored_conversation import Held
from llmcli.config import Config
from llmcli.errors import UserError

LAST = "last"
KINDS = {"saved": saved_chats.read, "sitting": session_log_reader.read}


@dataclass(frozen=True, slots=True)
class Item:
    """A stored conversation: its file, and the KV state that a saved chat may have.

    `time` is the time of the last change in seconds since 1970.
    """

    name: str
    kind: Literal["saved", "sitting"]
    path: Path
    time: float
    nbytes: int

    @property
    def state(self) -> Path:
        """The path of its KV state, which may not exist."""
        return self.path.with_suffix(".kv")

    @property
    def state_bytes(self) -> int:
        """The size of its KV state in bytes, 0 without one."""
        try:
            return self.state.stat().st_size
        except OSError:
            return 0

    def read(self) -> Held:
        """Read the conversation. Raises UserError."""
        try:
            return KINDS[self.kind](self.path)
        except OSError as error:
            raise UserError(
                f"cannot read {self.path}: {error.strerror}", hint="check the file"
            ) from None


def items(config: Config) -> list[Item]:
    """Return all stored conversations, newest first."""
    unsorted = [*_of(config.state / "saved", "saved"), *_of(config.state / "sessions", "sitting")]
    return sorted(unsorted, key=lambda item: (-item.time, item.name))


def find(config: Config, name: str) -> Item:
    """Find a stored conversation by name; `last` is the newest session. Raises UserError.

    A saved chat precedes a session of the same name.
    """
    all_items = items(config)
    sittings = [item for item in all_items if item.kind == "sitting"]
    for item in (*(item for item in all_items if item.kind == "saved"), *sittings):
        if item.name == name:
            return item
    if name == LAST:
        if sittings:
            return sittings[0]
        raise UserError("there is no session to resume yet", hint="start one with: llmcli chat")
    names = [item.name for item in all_items]
    near = get_close_matches(name, names, 1) or names[:1]
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(f"no conversation called {name!r}", hint=f"{hint}llmcli sessions lists them")


def remove(item: Item) -> int:
    """Delete a conversation and its KV state; return the freed bytes.

    Raises UserError if it is in use.
    """
    if item.kind == "sitting" and busy(item.path):
        raise UserError(f"{item.name} is in use", hint="leave that chat first")
    freed = item.nbytes + item.state_bytes
    for path in (item.path, item.state):
        path.unlink(missing_ok=True)
    return freed


def _of(folder: Path, kind: Literal["saved", "sitting"]) -> list[Item]:
    """List the conversations of one folder."""
    listed = []
    for path in folder.glob("*.jsonl"):
        try:
            status = path.stat()
        except OSError:  # deleted meanwhile
            continue
        listed.append(Item(path.stem, kind, path, status.st_mtime, status.st_size))
    return listed
