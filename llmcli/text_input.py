"""Read text that the user gives: files, arguments and chat templates. It must be UTF-8."""

from pathlib import Path

from llmcli.errors import UserError


def decode_utf8(raw: bytes, name: str, start: int = 0, hint_prefix: str = "") -> str:
    """Decode the UTF-8 bytes `raw`. Raises UserError, which states the first invalid byte and its
    position, if they are not UTF-8.

    For the message: `name` is the name of the input, `start` is the position of `raw` in the input,
    and `hint_prefix` is put before the hint.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name} is not UTF-8 text: byte {start + error.start} is 0x{raw[error.start]:02x}",
            hint=f"{hint_prefix}convert it first: iconv -f LATIN1 -t UTF-8",
        ) from None


MAX_TEXT_BYTES = 1 << 26  # maximum size of a text file


def require_utf8(label: str, text: str) -> None:
    """Raise UserError if `text`, an argument of the command line, was not UTF-8. `label`: its name
    for the message.
    """
    decode_utf8(text.encode("utf-8", "surrogateescape"), label)


def read_template(file_or_text: str) -> str:
    """Return the Jinja text of a value of --chat-template: the contents of the file with this name,
    or the value itself if it contains a brace.

    Raises UserError if it is neither, or if the file cannot be read.
    """
    path = Path(file_or_text).expanduser()
    try:
        if path.is_file():
            return read_text(path)
    except OSError:  # Jinja text is often not a valid file name
        pass
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


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file. Raises UserError if the file cannot be read, is not UTF-8,
    or has more than MAX_TEXT_BYTES bytes.
    """
    # limited, because the path may be that of an endless device
    raw = read_limited(path, MAX_TEXT_BYTES, hint="check the name")
    if len(raw) > MAX_TEXT_BYTES:
        raise UserError(
            f"{path} has more than {MAX_TEXT_BYTES:,} bytes",
            hint="no context can hold that much text: split the file",
        )
    return decode_utf8(raw, str(path))
