"""Lists, finds and deletes the stored conversations: saved chats (`/save`), and the logs of earlier
sessions.
"""

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
    """The file of a stored conversation.

    `name`: name of the saved chat, or start time and process id of the session. `kind`: "saved" for
    a saved chat, "sitting" for a session log. `modified_time`: time of the last change in seconds
    since 1970. `nbytes`: size of the file.
    """

    name: str
    kind: Literal["saved", "sitting"]
    path: Path
    modified_time: float
    nbytes: int

    @property
    def state_path(self) -> Path:
        """The path of the file with the conversation's KV cache. Only some saved chats have one."""
        return self.path.with_suffix(".kv")

    @property
    def state_bytes(self) -> int:
        """The size of the KV state's file in bytes; 0 if there is none."""
        try:
            return self.state_path.stat().st_size
        except OSError:
            return 0

    def read_conversation(self) -> StoredConversation:
        """Read the conversation from its file. Raises UserError if that is not possible."""
        try:
            return READER_OF_KIND[self.kind](self.path)
        except OSError as error:
            raise UserError(
                f"cannot read {self.path}: {error.strerror}", hint="check the file"
            ) from None


def list_history(config: Config) -> list[HistoryItem]:
    """Return all stored conversations, the last changed first."""
    items = [
        *_read_items(config.state / "saved", "saved"),
        *_read_items(config.state / "sessions", "sitting"),
    ]
    return sorted(items, key=lambda item: (-item.modified_time, item.name))


def find_item(config: Config, name: str) -> HistoryItem:
    """Return the stored conversation called `name`, or the newest session if `name` is "last". A
    saved chat has precedence over a session of the same name. Raises UserError if there is none.
    """
    all_items = list_history(config)
    sessions = [item for item in all_items if item.kind == "sitting"]
    for item in (*(item for item in all_items if item.kind == "saved"), *sessions):
        if item.name == name:
            return item
    if name == LAST_NAME:
        if sessions:
            return sessions[0]
        raise UserError("there is no session to resume yet", hint="start one with: llmcli chat")
    names = [item.name for item in all_items]
    suggestions = get_close_matches(name, names, 1) or names[:1]
    hint = f"did you mean {suggestions[0]}? " if suggestions else ""
    raise UserError(f"no conversation called {name!r}", hint=f"{hint}llmcli sessions lists them")


def remove_item(item: HistoryItem) -> int:
    """Delete the files of a stored conversation. Return the number of freed bytes. Raises UserError
    if a running chat writes to it.
    """
    if item.kind == "sitting" and is_in_use(item.path):
        raise UserError(f"{item.name} is in use", hint="leave that chat first")
    n_freed = item.nbytes + item.state_bytes
    for path in (item.path, item.state_path):
        path.unlink(missing_ok=True)
    return n_freed


def _read_items(folder: Path, kind: Literal["saved", "sitting"]) -> list[HistoryItem]:
    """Return the conversations in a folder, all of which have the kind `kind`."""
    items = []
    for path in folder.glob("*.jsonl"):
        try:
            status = path.stat()
        except OSError:  # deleted meanwhile
            continue
        items.append(HistoryItem(path.stem, kind, path, status.st_mtime, status.st_size))
    return items
