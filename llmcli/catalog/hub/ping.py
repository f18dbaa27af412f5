"""Checks with one small request whether the hub answers."""

from llmcli.config import Config, disable_hub_telemetry

TIMEOUT_SECONDS = 15.0


def ping_hub(config: Config) -> str:
    """Return "" if the hub answers with a status below 500, otherwise a short text about the
    failure.
    """
    disable_hub_telemetry()
    import httpx2
    from huggingface_hub import get_session

    try:
        response = get_session().head(f"{config.hub_endpoint}/api/models", timeout=TIMEOUT_SECONDS)
    except (httpx2.TransportError, httpx2.InvalidURL) as error:
        return (str(error.__cause__ or error) or type(error).__name__).splitlines()[0]
    return f"status {response.status_code}" if response.status_code >= 500 else ""
