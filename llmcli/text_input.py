"""Text from the user: files, arguments and templates, decoded as UTF-8."""

from pathlib import Path

from llmcli.errors import UserError


def decoded(raw: bytes, what: str, start: int = 0, left_out: str = "") -> str:
    """Decode UTF-8. Raises UserError that names the first invalid byte.

    `what` names the input in the message, `start` is the offset of `raw` in it, and `left_out` is
    put before the hint.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{what} is not UTF-8 text: byte {start + error.start} is 0x{raw[error.start]:02x}",
            hint=f"{left_out}convert it first: iconv -f LATIN1 -t UTF-8",
        ) from None


MOST_BYTES = 1 << 26  # largest text file that is read whole


def proper(what: str, text: str) -> None:
    """Raise UserError if `text`, an argument named `label`, is not UTF-8."""
    decoded(text.encode("utf-8", "surrogateescape"), what)


def template_text(given: str) -> str:
    """Return the Jinja text that --chat-template names: a file's content, or `file_or_text` itself.

    Raises UserError if it is neither.
    """
    path = Path(given).expanduser()
    try:
        if path.is_file():
            return text_file(path)
    except OSError:  # a Jinja text may not be a valid file name
        pass
    if "{" not in given:
        raise UserError(
            f"there is no template file {given}",
            hint="--chat-template takes a file, or a Jinja text",
        )
    return given


def text_file(path: Path) -> str:
    """Return the text of a file.

    Raises UserError if the file cannot be read, is too large or is not UTF-8; the error names the
    first invalid byte.
    """
    try:
        with path.open("rb") as file:  # may be a pipe or an endless device
            raw = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", hint="check the name") from None
    if len(raw) > MOST_BYTES:
        raise UserError(
            f"{path} has more than {MOST_BYTES:,} bytes",
            hint="no context can hold that much text: split the file",
        )
    return decoded(raw, str(path))
