"""The HTTP headers of a request to the hub."""

from llmcli.config import Config


def hub_headers(config: Config) -> dict[str, str]:
    """Return headers with the program's name and, if there is one, the user's token."""
    from huggingface_hub import __version__

    headers = {"user-agent": f"llmcli; hf_hub/{__version__}"}
    if config.hub_token:
        headers["authorization"] = f"Bearer {config.hub_token}"
    return headers
