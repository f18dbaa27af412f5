"""The root of every error that a user can put right.

It lives below both packages so that `quant` can raise it and `llmcli` can catch it.
"""


class Refusal(Exception):
    """Something the user can put right: what happened, and what to type next."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class Damaged(Refusal):
    """The source's own content is at fault: what was begun is not worth going on with."""


class Pickled(Refusal):
    """Weights are there as pickles only, and nobody has allowed to read those."""
