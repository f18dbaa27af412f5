"""The stored conversations: saved chats by name, and session logs by their start time."""

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from llmcli.chat.conversation import saved_chats, session_log_reader
from llmcli.chat.conversation.session_log import is_in_use
from llmcli.chat.conversation.stored_conversation import StoredConversation
from llmcli.config import Config
from llmcli.errors import UserError

LAST_NAME = "last"
READER_OF_KIND = {"saved": saved_chats.read_chat, "sitting": session_log_reader.read_log}


@dataclass(frozen=True, slots=True)
class HistoryItem:
    """A stored conversation: its file, and the path of its KV state, which only saved chats have.

    `modified_time` is the time of the last change in seconds since 1970.
    """

    name: str
    kind: Literal["saved", "sitting"]
    path: Path
    modified_time: float
    nbytes: int

    @property
    def state_path(self) -> Path:
        """The path of the conversation's KV state, which may not exist."""
        return self.path.with_suffix(".kv")

    @property
    def state_bytes(self) -> int:
        """The size of the conversation's KV state in bytes, 0 without one."""
        try:
            return self.state_path.stat().st_size
        except OSError:
            return 0

    def read_conversation(self) -> StoredConversation:
        """Read the conversation. Raises UserError."""
        try:
            return READER_OF_KIND[self.kind](self.path)
        except OSError as error:
            raise UserError(
                f"cannot read {self.path}: {error.strerror}", hint="check the file"
            ) from None


def list_history(config: Config) -> list[HistoryItem]:
    """Return all stored conversations, newest first."""
    unsorted = [
        *_read_items(config.state / "saved", "saved"),
        *_read_items(config.state / "sessions", "sitting"),
    ]
    return sorted(unsorted, key=lambda item: (-item.modified_time, item.name))


def find_item(config: Config, name: str) -> HistoryItem:
    """Find a stored conversation by name; `last` is the newest session. Raises UserError.

    If a saved chat and a session have the same name, the saved chat is returned.
    """
    all_items = list_history(config)
    sittings = [item for item in all_items if item.kind == "sitting"]
    for item in (*(item for item in all_items if item.kind == "saved"), *sittings):
        if item.name == name:
            return item
    if name == LAST_NAME:
        if sittings:
            return sittings[0]
        raise UserError("there is no session to resume yet", hint="start one with: llmcli chat")
    names = [item.name for item in all_items]
    near = get_close_matches(name, names, 1) or names[:1]
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(f"no conversation called {name!r}", hint=f"{hint}llmcli sessions lists them")


def remove_item(item: HistoryItem) -> int:
    """Delete a conversation and its KV state; return the freed bytes.

    Raises UserError if it is in use.
    """
    if item.kind == "sitting" and is_in_use(item.path):
        raise UserError(f"{item.name} is in use", hint="leave that chat first")
    freed = item.nbytes + item.state_bytes
    for path in (item.path, item.state_path):
        path.unlink(missing_ok=True)
    return freed


def _read_items(folder: Path, kind: Literal["saved", "sitting"]) -> list[HistoryItem]:
    """List the conversations of one folder."""
    listed = []
    for path in folder.glob("*.jsonl"):
        try:
            status = path.stat()
        except OSError:  # deleted meanwhile
            continue
        listed.append(HistoryItem(path.stem, kind, path, status.st_mtime, status.st_size))
    return listed
