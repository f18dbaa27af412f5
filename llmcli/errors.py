"""What a user of the command line can put right. Bugs of ours are not here: they crash."""

from quant.errors import Refusal


class UserError(Refusal):
    """A mistake of the user's or of the world's, with the next thing to type as its hint."""


class ReaderGone(Exception):
    """Whoever read our output has gone (`llmcli list | head -1`): nobody's error, and nobody is
    left to tell.
    """


class UsageError(UserError):
    """A command that was typed wrong; it exits with 2 where other user errors exit with 1."""
