"""A small question to the hub, asked again where its answer was lost on the way.

What is fetched in bulk goes on where it broke instead (sources/hub.py, ranges.py); this knows no
bytes.
"""

import time
from collections.abc import Callable
from typing import TypeVar

TRIES = 5
AGAIN = (408, 500, 502, 503, 504)
Answer = TypeVar("Answer")


def patiently(ask: Callable[[], Answer]) -> Answer:
    """What `ask` returns; a host that cannot be reached at all is told at once."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    for vain in range(TRIES):
        try:
            return ask()
        except (httpx2.TransportError, LocalEntryNotFoundError) as error:
            cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else error
            if vain == TRIES - 1 or isinstance(cause, httpx2.ConnectError):
                raise
        except HfHubHTTPError as error:
            if vain == TRIES - 1 or error.response.status_code not in AGAIN:
                raise
        time.sleep(2**vain / 4)
    raise AssertionError
