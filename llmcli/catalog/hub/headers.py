"""The HTTP headers that llmcli sends to the hub."""

from llmcli.config import Config


def hub_headers(config: Config) -> dict[str, str]:
    """Return the headers for a request: the program's name and, if it is set, the user's token."""
    from huggingface_hub import __version__

    headers = {"user-agent": f"llmcli; hf_hub/{__version__}"}
    if config.hub_token:
        headers["authorization"] = f"Bearer {config.hub_token}"
    return headers
