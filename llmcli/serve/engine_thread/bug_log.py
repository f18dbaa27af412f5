"""Writes the traceback of a bug to the server's log, which is standard error. The bug fails one call,
whose client receives status 500 and no details; the server goes on.
"""

import logging

from llmcli.errors import UserError

# Without a handler, Python writes the records of a logger to standard error.
LOGGER = logging.getLogger("llmcli.serve")


def log_bug(error: BaseException) -> None:
    """Write the traceback of an error, unless it is a UserError, which is no bug."""
    if not isinstance(error, UserError):
        LOGGER.error("a bug failed one call:", exc_info=error)
