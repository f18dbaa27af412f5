"""main(): the one place where an error becomes words and an exit code.

The commands are imported inside it: that takes a moment, in which Ctrl-C is told like at any other.
"""

import errno
import io
import os
import sys
from contextlib import suppress

# Python's words for a ~NAME of nobody here, and for a disk on which no temporary file can be made:
# no errno tells them.
NO_HOME, NO_PLACE = "Could not determine home directory.", "No usable temporary directory"
# What the disk or its owner does not allow is the world's mistake wherever it is met; other
# OSErrors are our bugs.
REFUSED = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}


def main() -> None:
    """Run the command line; a user's mistake is one line and a hint, a bug of ours is a traceback."""
    _standard_streams()
    try:
        _run()
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        raise SystemExit(130) from None


def _run() -> None:
    """The command, and words for what a user did. What an import raises is told as it is: it has no
    words yet.
    """
    from llmcli import config
    from llmcli.commands.root import app
    from llmcli.errors import ReaderGone, UsageError, UserError
    from llmcli.ui import UI
    from quant.errors import Refusal

    try:
        try:
            app()
        except OSError as error:
            said = error.strerror or ""
            if said.startswith(NO_PLACE):
                raise UserError(
                    said, hint="make room, or let TMPDIR name a folder that can be written"
                ) from error
            if error.errno not in REFUSED:
                raise
            what = f"use {error.filename}" if error.filename else "write the output"
            raise UserError(
                f"cannot {what}: {error.strerror}", hint="make room or check the permissions"
            ) from error
        except RuntimeError as error:
            if str(error) != NO_HOME:
                raise
            raise UserError(
                "a ~ names a home that there is not", hint="write the whole path"
            ) from error
    except Refusal as error:
        UI().error(str(error), error.hint)
        _settle_output()
        if config.load().debug:
            raise
        raise SystemExit(2 if isinstance(error, UsageError) else 1) from None
    except ReaderGone:
        _drop_output()
        raise SystemExit(0) from None


def _standard_streams() -> None:
    """Give closed standard streams a place of their own, and stdout a way out for what it cannot
    show.

    Without it the next file that is opened becomes descriptor 0, 1 or 2, and what llama.cpp says
    lands in it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the lowest free descriptor is the one that is missing
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="replace"
        )  # a terminal that is not UTF-8 gets ? for what it cannot show


def _settle_output() -> None:
    """Write what stdout still holds, or let it fall where it cannot be written: that has been told."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        _drop_output()


def _drop_output() -> None:
    """Let what is still in stdout's buffer fall, so that Python does not try it once more at the
    end.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            os.dup2(nowhere, stream.fileno())


if __name__ == "__main__":
    main()
