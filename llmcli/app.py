"""The entry point: main() turns errors into messages and exit codes.

The commands are imported inside main(), so that Ctrl-C during the import ends the program cleanly.
"""

import errno
import io
import os
import sys
from contextlib import suppress

# Texts that Python raises for an unknown ~NAME, and when no temporary folder is writable. These
# errors carry no errno.
NO_HOME_MESSAGE, NO_TEMP_FOLDER_MESSAGE = (
    "Could not determine home directory.",
    "No usable temporary directory",
)
# OSErrors that the user can resolve: disk space and permissions. Any other OSError is a bug.
USER_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}


def main() -> None:
    """Run the command line.

    A user error prints one line and a hint; a bug prints a traceback.
    """
    _standard_streams()
    try:
        _run()
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        raise SystemExit(130) from None


def _run() -> None:
    """Run the command and print user errors. Errors raised by the imports are not caught here."""
    from llmcli import config
    from llmcli.commands.cli import app
    from llmcli.errors import OutputClosed, UsageError, UserError
    from llmcli.ui import UI

    try:
        try:
            app()
        except OSError as error:
            message = error.strerror or ""
            if message.startswith(NO_TEMP_FOLDER_MESSAGE):
                raise UserError(
                    message, hint="free disk space, or set TMPDIR to a writable folder"
                ) from error
            if error.errno not in USER_ERRNOS:
                raise
            action = f"use {error.filename}" if error.filename else "write the output"
            raise UserError(
                f"cannot {action}: {error.strerror}",
                hint="free disk space or check the permissions",
            ) from error
        except RuntimeError as error:
            if str(error) != NO_HOME_MESSAGE:
                raise
            raise UserError(
                "cannot expand ~: no such home directory", hint="write the full path"
            ) from error
    except UserError as error:
        UI().error(str(error), error.hint)
        _settle_output()
        if config.load_config().debug:
            raise
        raise SystemExit(2 if isinstance(error, UsageError) else 1) from None
    except OutputClosed:
        _drop_output()
        raise SystemExit(0) from None


def _standard_streams() -> None:
    """Open missing standard streams, and let stdout replace characters that it cannot encode.

    If a standard stream is closed, the next opened file gets descriptor 0, 1 or 2, and llama.cpp's
    log output would be written into it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the lowest free descriptor is the missing one
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _settle_output() -> None:
    """Flush stdout. If that fails, discard its buffer: an error message was already printed."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        _drop_output()


def _drop_output() -> None:
    """Discard what stdout and stderr still buffer, so that Python does not write it at exit."""
    null_device = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            os.dup2(null_device, stream.fileno())


if __name__ == "__main__":
    main()
