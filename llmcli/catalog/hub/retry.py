"""Retries requests to the hub after temporary failures. A small request is repeated. A transfer is
resumed where it was interrupted.
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from llmcli.catalog.hub.exchange import (
    RETRY_HINT,
    HubUnreachable,
    ProgressClock,
    RefusedRequest,
)

MAX_TRIES = 5  # of a small request
MAX_FAILURES = 6  # consecutive requests without any data, after which a transfer fails
# A transfer fails when the server falls silent this many times within so many bytes.
MAX_STALLS, STALL_BYTES = 4, 1 << 23
# The longest wait that a server may ask for: before the first byte of a transfer, and after it.
FIRST_PAUSE_SECONDS = 20.0
MAX_PAUSE_SECONDS = 300.0
RETRIED_STATUSES = (408, 500, 502, 503, 504)
Response = TypeVar("Response")


def with_retries(request: Callable[[], Response], clock: ProgressClock) -> Response:
    """Call `request` and return its result. After a temporary failure, call it again, up to
    MAX_TRIES times in total and while `clock` has time left. If the host cannot be reached at all,
    raise the error at once.
    """
    import httpx2

    for attempt in range(MAX_TRIES):
        pause = 2**attempt / 4
        try:
            return request()
        except (httpx2.ConnectError, httpx2.UnsupportedProtocol):
            raise
        except (httpx2.TransportError, RefusedRequest) as error:
            is_final = isinstance(error, RefusedRequest) and error.status not in RETRIED_STATUSES
            if is_final or attempt == MAX_TRIES - 1 or clock.seconds_left < pause:
                raise
        time.sleep(pause)
        clock.add_wait(pause)
    raise AssertionError


def resume_transfer(
    fetch: Callable[[], None],
    count_missing: Callable[[], int],
    report_break: Callable[[float], None],
    clock: ProgressClock,
    statuses: Sequence[int] = RETRIED_STATUSES,
    max_pause: float = MAX_PAUSE_SECONDS,
) -> None:
    """Call `fetch`, which requests the missing bytes, until `count_missing` returns 0.

    A call may fail or end early. After a broken connection or a response with one of `statuses`, it
    is repeated. Before that, `report_break` is called with the seconds that the server has asked to
    wait, or 0. After MAX_FAILURES consecutive calls without new bytes, the last error is raised.

    Raises HubUnreachable if `clock` has no time left, if the server falls silent again and again, or
    if it asks to wait more than `max_pause` seconds, now or in total without progress.
    """
    import httpx2

    failures, paused, stalls, n_at_stall = 0, 0.0, 0, count_missing()
    while n_missing := count_missing():
        error: Exception | None = None
        pause = 0.0
        try:
            fetch()
        except httpx2.UnsupportedProtocol:
            raise
        except httpx2.TransportError as broken:
            error = broken
        except RefusedRequest as refused:
            if refused.status not in statuses:
                raise
            error, pause = refused, refused.pause
        if not count_missing():
            return
        failures = 0 if count_missing() < n_missing else failures + 1
        paused = paused + pause if failures else pause
        if isinstance(error, httpx2.TimeoutException):
            if n_at_stall - count_missing() >= STALL_BYTES:
                stalls, n_at_stall = 0, count_missing()
            stalls += 1
            if stalls == MAX_STALLS:
                raise HubUnreachable(
                    f"the server fell silent {stalls} times in a row", hint=RETRY_HINT
                )
        if failures == MAX_FAILURES:
            raise error or httpx2.ReadError("the server ended the transfer early")
        if paused > max_pause:
            raise HubUnreachable(
                f"{error}, and asks to wait {pause:.0f} seconds",
                hint="run the same command again after that time: it resumes",
            )
        report_break(pause)
        if pause:
            time.sleep(pause)  # the server has asked for it, so it does not count as a wait
        elif failures:
            backoff = min(2 ** (failures - 1), 8)
            time.sleep(backoff)
            clock.add_wait(backoff)
