"""Text that came as bytes; a leaf that every room may import."""

from llmcli.errors import UserError


def decoded(raw: bytes, what: str, start: int = 0, left_out: str = "") -> str:
    """UTF-8 text; raises UserError naming the first byte that is none.

    `start` is where `raw` begins in what is called `what`; `left_out` says what becomes of it.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{what} is not UTF-8 text: byte {start + error.start} is 0x{raw[error.start]:02x}",
            hint=f"{left_out}convert it first: iconv -f LATIN1 -t UTF-8",
        ) from None
