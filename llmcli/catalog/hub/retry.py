"""Retries requests to the hub after temporary failures. A small request is repeated. A transfer is
resumed where it was interrupted.
"""

import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import httpx2

MAX_TRIES = 5  # of a small request
MAX_FAILURES = 6  # consecutive requests without any data, after which a transfer fails
MAX_PAUSE_SECONDS = 300.0  # longer waits that a server asks for are shortened to this
RETRIED_STATUSES = (408, 500, 502, 503, 504)
Response = TypeVar("Response")


def with_retries(request: Callable[[], Response]) -> Response:
    """Call `request` and return its result. After a temporary failure, call it again, up to
    MAX_TRIES times in total. If the host cannot be reached at all, raise the error at once.
    """
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


def resume_transfer(
    fetch: Callable[[], None],
    count_missing: Callable[[], int],
    report_break: Callable[[float], None],
    statuses: Sequence[int] = RETRIED_STATUSES,
) -> None:
    """Call `fetch`, which requests the missing bytes, until `count_missing` returns 0.

    A call may fail or end early. After a broken connection or a response with one of `statuses`, it
    is repeated. Before that, `report_break` is called with the seconds that the server has asked to
    wait, or 0. After MAX_FAILURES consecutive calls without new bytes, the last error is raised.
    """
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

    failures = 0
    while n_missing := count_missing():
        error: Exception | None = None
        pause = 0.0
        try:
            fetch()
        except httpx2.TransportError as broken:
            error = broken
        except HfHubHTTPError as refused:
            if refused.response.status_code not in statuses:
                raise
            error, pause = refused, _requested_pause(refused.response)
        if not count_missing():
            return
        failures = 0 if count_missing() < n_missing else failures + 1
        if failures == MAX_FAILURES:
            raise error or httpx2.ReadError("the server ended the transfer early")
        report_break(pause)
        time.sleep(pause or (min(2 ** (failures - 1), 8) if failures else 0))


def _requested_pause(response: "httpx2.Response") -> float:
    """Return the seconds that a server asks to wait in the header Retry-After, at most
    MAX_PAUSE_SECONDS. 0 if the header is missing or not a number.
    """
    text = response.headers.get("retry-after", "")
    return min(float(text), MAX_PAUSE_SECONDS) if re.fullmatch("[0-9]+", text) else 0.0
