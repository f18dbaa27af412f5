"""Decoding of UTF-8 text from the user."""

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
