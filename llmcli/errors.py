"""The errors that the program reports as messages. Any other exception is a bug and ends with a
traceback.
"""

from quant.errors import NO_MEMORY_HINT as NO_MEMORY_HINT
from quant.errors import UserError as UserError


class OutputClosed(Exception):
    """Raised when the program that reads stdout has ended (`llmcli list | head -1`). llmcli then
    exits silently with 0.
    """


class UsageError(UserError):
    """A UserError for a command line that is wrong by itself, such as two options that exclude each
    other. llmcli exits with 2 for it, and with 1 for other user errors.
    """
