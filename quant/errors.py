"""Errors that a user can fix, each with a hint.

`quant` raises them, and `llmcli` prints them.
"""

from collections.abc import Sequence


class UserError(Exception):
    """An error that the user can fix.

    The message says what happened; `hint` is a command or one instruction.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class DamagedSourceError(UserError):
    """The content of the source is damaged. Partial output made from it is deleted, because it
    cannot be resumed.
    """


class PickleNotAllowedError(UserError):
    """A checkpoint has only pickled weights, and reading pickles was not allowed."""


def list_first(items: Sequence[str], limit: int) -> str:
    """Return the first `limit` items as text for an error, with the number of items that are left
    out.
    """
    others = len(items) - limit
    return "; ".join(items[:limit]) + (f"; and {others} more" if others > 0 else "")
