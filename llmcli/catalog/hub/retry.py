"""Retries of small hub requests whose answer was lost.

Downloads resume at the byte where they broke instead (sources/hub.py, ranges.py).
"""

import time
from collections.abc import Callable
from typing import TypeVar

MAX_TRIES = 5
RETRIED_STATUSES = (408, 500, 502, 503, 504)
Response = TypeVar("Response")


def with_retries(request: Callable[[], Response]) -> Response:
    """Return `ask()`, retrying transient failures. A host that cannot be reached fails at once."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    for attempt in range(MAX_TRIES):
        try:
            return request()
        except (httpx2.TransportError, LocalEntryNotFoundError) as error:
            cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else error
            if attempt == MAX_TRIES - 1 or isinstance(cause, httpx2.ConnectError):
                raise
        except HfHubHTTPError as error:
            if attempt == MAX_TRIES - 1 or error.response.status_code not in RETRIED_STATUSES:
                raise
        time.sleep(2**attempt / 4)
    raise AssertionError
