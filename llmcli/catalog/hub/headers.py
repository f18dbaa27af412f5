"""The HTTP headers that llmcli sends to the hub."""

from llmcli.config import Config
from llmcli.errors import UserError


def hub_headers(config: Config) -> dict[str, str]:
    """Return the headers for a request: the program's name and, if it is set, the user's token.
    Raises UserError if the token cannot be sent in a header.
    """
    from huggingface_hub import __version__

    headers = {"user-agent": f"llmcli; hf_hub/{__version__}"}
    if token := config.hub_token:
        if not (token.isascii() and token.isprintable() and " " not in token):
            raise UserError(
                "the hub's token has a character that no token has",
                hint="set HF_TOKEN to the token alone, or run `hf auth login` again",
            )
        headers["authorization"] = f"Bearer {token}"
    return headers
