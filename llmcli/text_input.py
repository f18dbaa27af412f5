"""Read text that the user gives: files, standard input, arguments and chat templates.

The text must be UTF-8, with or without a byte-order mark, which is removed. Other encodings are
refused by name. Windows line ends (CR LF) become LF, because models are trained on LF; a caller can
keep them. A single CR is never changed.
"""

import codecs
import fcntl
import os
import shlex
import stat
import sys
import termios
from pathlib import Path

from llmcli.errors import UserError

MAX_TEXT_BYTES = 1 << 26  # maximum size of a text
SPLIT_TEXT_HINT = "no context can hold that much text: split it"
BYTE_ORDER_MARK = "\ufeff"
# Byte-order marks of other encodings, the longest first, with iconv's name of the encoding.
FOREIGN_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
SAMPLE_BYTES = 64  # bytes of a text in which UTF-16 without a byte-order mark is recognized


def decode_text(
    raw: bytes,
    name: str,
    *,
    path: Path | None = None,
    start: int = 0,
    hint_prefix: str = "",
    keep_line_ends: bool = False,
) -> str:
    """Decode a text in UTF-8, without its byte-order mark and with LF as the line end.

    `keep_line_ends`: do not change CR LF. For the message: `name` is the name of the input, `path`
    is its file (None: not a file), `start` is the position of `raw` in the input, and `hint_prefix`
    is put before the hint. Raises UserError, which names another encoding, or the first invalid
    byte and its position.
    """
    if not start:
        refuse_foreign_encoding(raw, name, path=path, hint_prefix=hint_prefix)
    text = decode_utf8(raw, name, start, hint_prefix, path)
    if not start:
        text = text.removeprefix(BYTE_ORDER_MARK)
    return text if keep_line_ends else text.replace("\r\n", "\n")


def decode_utf8(
    raw: bytes, name: str, start: int = 0, hint_prefix: str = "", path: Path | None = None
) -> str:
    """Decode the UTF-8 bytes `raw` and change nothing. Raises UserError, which states the first
    invalid byte and its position, if they are not UTF-8. For the parameters see `decode_text`.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        number = raw.count(b"\n", 0, error.start) + 1
        line = "" if path is None else f", in line {number}"
        raise UserError(
            f"{name} is not UTF-8 text: byte {start + error.start} is 0x{raw[error.start]:02x}{line}",
            hint=hint_prefix + _conversion_hint("LATIN1", path),
        ) from None


def refuse_foreign_encoding(
    raw: bytes, name: str, *, path: Path | None = None, hint_prefix: str = ""
) -> None:
    """Raise UserError, which names the encoding, if the bytes at the start of a text are UTF-16 or
    UTF-32. For the parameters see `decode_text`.
    """
    if encoding := _foreign_encoding(raw):
        raise UserError(
            f"{name} is {encoding} text, and llmcli reads UTF-8",
            hint=hint_prefix + _conversion_hint(encoding, path),
        )


def _foreign_encoding(raw: bytes) -> str:
    """Return iconv's name of the encoding if the bytes at the start of a text are UTF-16 or UTF-32,
    otherwise "".

    Without a byte-order mark, UTF-16 is recognized if every second byte of the sample is NUL and no
    other byte is, as in text of Latin letters.
    """
    for mark, encoding in FOREIGN_MARKS:
        if raw.startswith(mark):
            return encoding
    sample = raw[: min(SAMPLE_BYTES, len(raw) & ~1)]
    if len(sample) >= 4:
        for first_letter, encoding in ((0, "UTF-16LE"), (1, "UTF-16BE")):
            if all(sample[first_letter::2]) and not any(sample[1 - first_letter :: 2]):
                return encoding
    return ""


def _conversion_hint(encoding: str, path: Path | None) -> str:
    """Return the command that converts a text from `encoding` to UTF-8."""
    files = "" if path is None else f" {shlex.quote(str(path))} > utf8{path.suffix or '.txt'}"
    return f"convert it first: iconv -f {encoding} -t UTF-8{files}"


def require_utf8(label: str, text: str) -> None:
    """Raise UserError if `text`, an argument of the command line, was not UTF-8. `label`: its name
    for the message.
    """
    decode_utf8(text.encode("utf-8", "surrogateescape"), label)


def expand_path(text: str) -> Path:
    """Return the path that a typed file name means. `~` at its start is a home folder; in `./~x` it
    is a part of the name, which Path.expanduser() does not see, because Path drops the `./`. Raises
    RuntimeError for an unknown home folder.
    """
    return Path(text).expanduser() if text.startswith("~") else Path(text)


def read_template(file_or_text: str) -> str:
    """Return the Jinja text of a value of --chat-template: the contents of the file with this name,
    or the value itself if it contains a brace.

    Raises UserError if it is neither, or if the file cannot be read.
    """
    try:
        path = expand_path(file_or_text)
        is_file = path.is_file()
    except (OSError, ValueError, RuntimeError):  # Jinja text is often not a valid file name
        is_file = False
    if is_file:
        return read_text(path)
    if "{" not in file_or_text:
        raise UserError(
            f"there is no template file {file_or_text}",
            hint="--chat-template takes a file, or a Jinja text",
        )
    return file_or_text


def read_limited(
    path: Path, max_bytes: int, hint: str, special_file_hint: str = "", folder_hint: str = ""
) -> bytes:
    """Return the first `max_bytes` + 1 bytes of a file. The file is too long if the result has more
    than `max_bytes` bytes; the caller must check this.

    Raises UserError with `hint` if the file cannot be read. If `folder_hint` is given, it is the
    hint for a folder. If `special_file_hint` is given, anything else that is not a regular file is
    refused with this hint.
    """
    try:
        if folder_hint and path.is_dir():
            raise UserError(f"{path} is a folder", hint=folder_hint)
        if special_file_hint and path.exists() and not path.is_file():
            raise UserError(f"{path} is not a regular file", hint=special_file_hint)
        with path.open("rb") as file:
            return file.read(max_bytes + 1)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", hint=hint) from None


def read_text(
    path: Path,
    *,
    max_bytes: int = MAX_TEXT_BYTES,
    keep_line_ends: bool = False,
    hint: str = "check the name",
    size_hint: str = SPLIT_TEXT_HINT,
) -> str:
    """Return the text of a UTF-8 file, as `decode_text` does.

    Raises UserError if the file cannot be read (`hint`), has more than `max_bytes` bytes
    (`size_hint`), or is not UTF-8.
    """
    # limited, because the path may be that of an endless device
    raw = read_limited(path, max_bytes, hint=hint)
    if len(raw) > max_bytes:
        raise UserError(f"{path} has more than {max_bytes:,} bytes", hint=size_hint)
    return decode_text(raw, str(path), path=path, keep_line_ends=keep_line_ends)


def read_standard_input(*, keep_line_ends: bool = False) -> str:
    """Return the text of standard input up to its end, as `decode_text` does. Raises UserError if
    it has more than MAX_TEXT_BYTES bytes, or is not UTF-8.
    """
    raw = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
    if len(raw) > MAX_TEXT_BYTES:
        raise UserError(
            f"standard input has more than {MAX_TEXT_BYTES:,} bytes", hint=SPLIT_TEXT_HINT
        )
    return decode_text(raw, "stdin", keep_line_ends=keep_line_ends)


def has_unread_input() -> bool:
    """Return whether standard input is a pipe or a file with bytes that nothing has read yet. Does
    not wait, and reads nothing.
    """
    try:
        descriptor = sys.stdin.fileno()
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            return os.lseek(descriptor, 0, os.SEEK_CUR) < status.st_size
        if not stat.S_ISFIFO(status.st_mode):
            return False
        return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), "little") > 0
    except (AttributeError, OSError, ValueError):  # no stdin, or one without a descriptor
        return False
