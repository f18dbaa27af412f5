"""Checks with one small request whether the hub answers."""

from dataclasses import replace

from llmcli.catalog.hub.exchange import ProgressClock, open_reply
from llmcli.catalog.hub.headers import hub_headers
from llmcli.config import Config, disable_hub_telemetry
from llmcli.errors import UserError


def ping_hub(config: Config) -> str:
    """Return "" if the hub answers with a status below 500, otherwise a short text about the
    failure.
    """
    disable_hub_telemetry()
    import httpx2

    # without the token, which is not needed
    url, headers = f"{config.hub_endpoint}/api/models", hub_headers(replace(config, hub_token=None))
    try:
        with open_reply(url, headers, ProgressClock(), method="HEAD") as reply:
            status = reply.status
    except UserError as error:
        return str(error)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        return (str(error.__cause__ or error) or type(error).__name__).splitlines()[0]
    return f"status {status}" if status >= 500 else ""
