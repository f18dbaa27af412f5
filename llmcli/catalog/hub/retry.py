"""Retries of small hub requests whose answer was lost.

Downloads resume at the byte where they broke instead (sources/hub.py, ranges.py).
"""

import time
from collections.abc import Callable
from typing import TypeVar

TRIES = 5
AGAIN = (408, 500, 502, 503, 504)
Answer = TypeVar("Answer")


def patiently(ask: Callable[[], Answer]) -> Answer:
    """Return `ask()`, retrying transient failures. A host that cannot be reached fails at once."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    for attempt in range(TRIES):
        try:
            return ask()
        except (httpx2.TransportError, LocalEntryNotFoundError) as error:
            cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else error
            if attempt == TRIES - 1 or isinstance(cause, httpx2.ConnectError):
                raise
        except HfHubHTTPError as error:
            if attempt == TRIES - 1 or error.response.status_code not in AGAIN:
                raise
        time.sleep(2**attempt / 4)
    raise AssertionError
