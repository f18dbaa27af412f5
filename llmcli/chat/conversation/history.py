"""What is kept of conversations: saved chats by their names, and the log of every sitting by when
it began.
"""

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
    """One conversation on the disk: its file, and beside a saved one perhaps its KV state. `time`
    is in seconds since 1970, when it was last written.
    """

    name: str
    kind: Literal["saved", "sitting"]
    path: Path
    time: float
    nbytes: int

    @property
    def state(self) -> Path:
        """Where its KV state is, if it has one."""
        return self.path.with_suffix(".kv")

    @property
    def state_bytes(self) -> int:
        """The size of its KV state, 0 without one."""
        try:
            return self.state.stat().st_size
        except OSError:
            return 0

    def read(self) -> Held:
        """The conversation. Raises UserError where it cannot be read."""
        try:
            return KINDS[self.kind](self.path)
        except OSError as error:
            raise UserError(
                f"cannot read {self.path}: {error.strerror}", hint="check the file"
            ) from None


def items(config: Config) -> list[Item]:
    """All of them, the newest first."""
    found = [*_of(config.state / "saved", "saved"), *_of(config.state / "sessions", "sitting")]
    return sorted(found, key=lambda item: (-item.time, item.name))


def find(config: Config, name: str) -> Item:
    """The conversation called `name`, a saved one before a sitting; `last`: the newest sitting.
    Raises UserError.
    """
    every = items(config)
    sittings = [item for item in every if item.kind == "sitting"]
    for item in (*(item for item in every if item.kind == "saved"), *sittings):
        if item.name == name:
            return item
    if name == LAST:
        if sittings:
            return sittings[0]
        raise UserError("there is no sitting to go on with yet", hint="llmcli chat begins one")
    known = [item.name for item in every]
    near = get_close_matches(name, known, 1) or known[:1]
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(f"no conversation called {name!r}", hint=f"{hint}llmcli sessions lists them")


def remove(item: Item) -> int:
    """Delete a conversation with its KV state; the bytes that are free now. Raises UserError where
    it is going on.
    """
    if item.kind == "sitting" and busy(item.path):
        raise UserError(f"{item.name} is going on", hint="leave that chat first")
    freed = item.nbytes + item.state_bytes
    for path in (item.path, item.state):
        path.unlink(missing_ok=True)
    return freed


def _of(folder: Path, kind: Literal["saved", "sitting"]) -> list[Item]:
    found = []
    for path in folder.glob("*.jsonl"):
        try:
            now = path.stat()
        except OSError:  # it has just gone
            continue
        found.append(Item(path.stem, kind, path, now.st_mtime, now.st_size))
    return found
