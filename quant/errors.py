"""Errors that a user can fix, each with a hint.

The package `quant` raises them, and `llmcli` prints them.
"""

from collections.abc import Sequence

NO_MEMORY_HINT = "close other programs, or raise the limit of this shell: ulimit -v unlimited"


class UserError(Exception):
    """An error that the user can fix.

    The message says what happened; `hint` is a command or one instruction.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class DamagedSourceError(UserError):
    """An error raised when the content of the source model is damaged. The files written so far are
    then deleted, because a later run must not resume output that was made from damaged bytes.
    """


class PickleNotAllowedError(UserError):
    """An error raised when a checkpoint has only pickled weights and the user has not
    allowed them.
    """


class UnknownClassError(UserError):
    """An error raised when quant/convert has no family for a checkpoint's class, `class_name`."""

    def __init__(self, message: str, hint: str, class_name: str) -> None:
        super().__init__(message, hint)
        self.class_name = class_name


def list_first(items: Sequence[str], limit: int) -> str:
    """Return the first `limit` items joined with semicolons, for an error message. If there are
    more items, the text ends with the number of omitted items ("; and 3 more").
    """
    others = len(items) - limit
    return "; ".join(items[:limit]) + (f"; and {others} more" if others > 0 else "")
