"""The record of a sitting: every reply is appended at once to state/sessions/START-PID.jsonl."""

import errno
import json
import os
import time
from collections.abc import Callable
from typing import Any

from llmcli.config import Config


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
