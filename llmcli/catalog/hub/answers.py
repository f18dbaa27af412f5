"""Whether the hub answers at all: one small question, asked once."""

from llmcli.config import Config, quiet_hub

TIMEOUT_SECONDS = 15.0


def answers(config: Config) -> str:
    """Empty where the hub answered, whatever it said; else what went wrong, in a few words."""
    quiet_hub()
    import httpx2
    from huggingface_hub import get_session

    try:
        response = get_session().head(f"{config.hub_endpoint}/api/models", timeout=TIMEOUT_SECONDS)
    except (httpx2.TransportError, httpx2.InvalidURL) as error:
        return (str(error.__cause__ or error) or type(error).__name__).splitlines()[0]
    return f"it answers {response.status_code}" if response.status_code >= 500 else ""
