"""The entry point of the program. main() runs the command line and turns errors into messages and
exit codes.

The commands are imported inside main(), so that Ctrl-C during the import ends the program without a
traceback.
"""

import codecs
import errno
import io
import os
import sys
from contextlib import suppress

from llmcli.start_checks import find_problem

# Messages of Python's errors for an unknown ~NAME, and for a system without a writable temporary
# folder. These errors have no errno.
NO_HOME_MESSAGE, NO_TEMP_FOLDER_MESSAGE = (
    "Could not determine home directory.",
    "No usable temporary directory",
)
# Errors of the operating system that the user can resolve: disk space and permissions. Any other
# OSError is a bug.
USER_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}


def main() -> None:
    """Run the command line of this process. An error that the user can resolve prints a message and
    a hint. Any other error is a bug and prints a traceback.

    Exits with 0 on success, 2 for wrong usage, 130 after Ctrl-C, and 1 for other errors.
    """
    if problem := find_problem():
        sys.stderr.write("error: {}\nhint: {}\n".format(*problem))
        raise SystemExit(1)
    _leave_ascii()
    _fix_standard_streams()
    try:
        _run()
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        raise SystemExit(130) from None


def _run() -> None:
    """Import and run the commands. Print a UserError and raise SystemExit for it. Errors while the
    modules are imported are not handled.
    """
    from llmcli import config
    from llmcli.commands.cli import app
    from llmcli.errors import NO_MEMORY_HINT, OutputClosed, UsageError, UserError
    from llmcli.ui import UI

    try:
        try:
            app(prog_name="llmcli")
        except OSError as error:
            message = error.strerror or ""
            if message.startswith(NO_TEMP_FOLDER_MESSAGE):
                raise UserError(
                    message, hint="free disk space, or set TMPDIR to a writable folder"
                ) from error
            if error.errno == errno.ENOMEM:
                raise UserError(f"out of memory: {message}", hint=NO_MEMORY_HINT) from error
            if error.errno not in USER_ERRNOS:
                raise
            action = f"use {error.filename}" if error.filename else "write the output"
            raise UserError(
                f"cannot {action}: {error.strerror}",
                hint="free disk space or check the permissions",
            ) from error
        except MemoryError as error:
            remark = f": {error}" if str(error) else ""
            raise UserError(f"out of memory{remark}", hint=NO_MEMORY_HINT) from error
        except RuntimeError as error:
            if str(error) != NO_HOME_MESSAGE:
                raise
            raise UserError(
                "cannot expand ~: no such home directory", hint="write the full path"
            ) from error
    except UserError as error:
        UI().error(str(error), error.hint)
        _flush_output()
        if config.load_config().debug:
            raise
        raise SystemExit(2 if isinstance(error, UsageError) else 1) from None
    except OutputClosed:
        _drop_output()
        raise SystemExit(0) from None


def _leave_ascii() -> None:
    """Start this program again in Python's UTF-8 mode if it was started in ASCII, as in the C locale
    with PYTHONUTF8=0. In ASCII, arguments that contain other characters would be damaged.
    """
    if codecs.lookup(sys.getfilesystemencoding()).name == "ascii":
        os.putenv("PYTHONUTF8", "1")  # for the processes that this one starts
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def _fix_standard_streams() -> None:
    """Open closed standard streams on the null device, and let stdout replace characters that it
    cannot encode.

    If a standard stream stayed closed, the next opened file would get its descriptor (0, 1 or 2),
    and llama.cpp would write its log into that file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # os.open returns the lowest free descriptor: the closed one
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _flush_output() -> None:
    """Flush stdout after an error message. If this fails, discard the buffered output, because a
    second error message would not help.
    """
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        _drop_output()


def _drop_output() -> None:
    """Redirect stdout and stderr to the null device, so that Python does not fail at exit when it
    writes what they still buffer.
    """
    null_device = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            os.dup2(null_device, stream.fileno())


if __name__ == "__main__":
    main()
