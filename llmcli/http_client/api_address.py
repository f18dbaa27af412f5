"""Reads the address of a server with OpenAI's API as a user types it."""

from urllib.parse import urlsplit

from llmcli.errors import UserError


def parse_base_url(url: str, example: str = "llmcli bench load http://127.0.0.1:8080") -> str:
    """Return the base URL of an API, such as http://host:8080/v1. Accepts http://host:8080, …/v1
    and …/v1/chat/completions. Raises UserError for anything else; `example` is its hint.
    """
    try:
        parts = urlsplit(url)
        is_valid = (
            parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        )
    except ValueError:
        is_valid = False
    if not is_valid:
        raise UserError(f"{url!r} is not a server address", hint=example)
    path = parts.path.rstrip("/").removesuffix("/completions").removesuffix("/chat")
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"
