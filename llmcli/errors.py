"""Errors that the user can resolve. Bugs are not caught: they end with a traceback."""

from quant.errors import UserError as UserError


class OutputClosed(Exception):
    """The program that reads stdout has ended (`llmcli list | head -1`). This is not an error."""


class UsageError(UserError):
    """A command line with invalid usage. It exits with 2; other user errors exit with 1."""
