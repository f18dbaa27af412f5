"""Text from the user: files, arguments and templates, decoded as UTF-8."""

from pathlib import Path

from llmcli.errors import UserError


def decode_utf8(raw: bytes, name: str, start: int = 0, hint_prefix: str = "") -> str:
    """Decode UTF-8. Raises UserError that names the first invalid byte.

    In the message, `name` names the input, and the position of the byte is counted from `start`,
    the offset of `raw` in that input. `hint_prefix` is put before the hint.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name} is not UTF-8 text: byte {start + error.start} is 0x{raw[error.start]:02x}",
            hint=f"{hint_prefix}convert it first: iconv -f LATIN1 -t UTF-8",
        ) from None


MAX_TEXT_BYTES = 1 << 26  # largest text file that is read whole


def require_utf8(label: str, text: str) -> None:
    """Raise UserError if `text`, an argument named `label`, is not UTF-8."""
    decode_utf8(text.encode("utf-8", "surrogateescape"), label)


def read_template(file_or_text: str) -> str:
    """Return the Jinja text that --chat-template names: a file's content, or `file_or_text` itself.

    Raises UserError if it is neither.
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
    """Return at most `max_bytes + 1` bytes of a file; more than `max_bytes` mean that it is too
    long.

    Raises UserError with `hint` if the file cannot be read. If given, `folder_hint` is the hint for
    a folder, and `special_file_hint` the hint for anything else that is not a regular file.
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
    """Return the text of a file.

    Raises UserError if the file cannot be read, is too large or is not UTF-8; the error names the
    first invalid byte.
    """
    # limited, because the path may name an endless device
    raw = read_limited(path, MAX_TEXT_BYTES, hint="check the name")
    if len(raw) > MAX_TEXT_BYTES:
        raise UserError(
            f"{path} has more than {MAX_TEXT_BYTES:,} bytes",
            hint="no context can hold that much text: split the file",
        )
    return decode_utf8(raw, str(path))
