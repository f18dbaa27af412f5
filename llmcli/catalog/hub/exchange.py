"""One request to the hub, or to a host to which the hub redirects, within limits.

- It follows MAX_REDIRECTS redirects, and never reads the body of a redirect to its end.
- It does not wait longer than a ProgressClock allows. A read of a socket has a time limit, too, but
  a server that sends single bytes can extend it for ever. So a thread reads the response, and the
  caller waits for the chunks. If the caller gives up, the thread ends with its next chunk.
- Bodies are taken as they are sent, never decompressed: nothing here asks for compression.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from llmcli.errors import UserError

if TYPE_CHECKING:
    import httpx2

TIMEOUT_SECONDS = 10.0  # the longest wait for the next byte
REPLY_SECONDS = 15.0  # the longest wait for the headers of a response, redirects included
PROGRESS_SECONDS = 35.0  # a transfer fails if it receives less than PROGRESS_BYTES in this time
PROGRESS_BYTES = 1 << 14
MAX_REDIRECTS = 5
MAX_WAITING_CHUNKS = 16  # that were received and not yet used; a chunk has at most 64 KiB
# Bytes of the body of a redirect or a refusal that are read so that the connection can be reused.
DRAINED_BYTES = 1 << 14
# Statuses of a complete body; 203 is that of a proxy.
COMPLETE_STATUSES = (200, 203)
RETRY_HINT = "try again later; downloaded data is kept, and the download resumes"


class HubUnreachable(UserError):
    """The hub, or the host to which it redirects, does not answer as a hub does. If the model is in
    the cache, it can be used nevertheless.
    """


class RefusedRequest(Exception):
    """A response with another status than those that the request expects.

    `host`: that has answered. `code`, `message`: of the hub about the reason, or "". `pause`: the
    seconds that the host asks to wait, or 0.
    """

    def __init__(self, reply: "HubReply") -> None:
        super().__init__(f"{reply.host} answers with status {reply.status}")
        self.status, self.host = reply.status, reply.host
        self.code = reply.headers.get("x-error-code", "")
        self.message = reply.headers.get("x-error-message", "")
        text = reply.headers.get("retry-after", "")
        is_number = text.isascii() and text.isdigit() and len(text) < 10
        self.pause = float(text) if is_number else 0.0


class ProgressClock:
    """Limits the time that is waited without progress. Progress means that `nbytes` bytes have
    arrived; then the `seconds` begin again. Several requests of one transfer share a clock.

    Only waits are counted, each with at most its own limit, so that a process which was stopped for
    a while can go on.
    """

    def __init__(self, seconds: float | None = None, nbytes: int | None = None) -> None:
        self.seconds = PROGRESS_SECONDS if seconds is None else seconds
        self.nbytes = PROGRESS_BYTES if nbytes is None else nbytes
        self.waited, self.received = 0.0, 0  # seconds and bytes since the last progress

    def add_bytes(self, nbytes: int) -> None:
        """Count bytes that have arrived."""
        self.received += nbytes
        if self.received >= self.nbytes:
            self.waited, self.received = 0.0, 0

    def add_wait(self, seconds: float) -> None:
        """Count the time of a wait."""
        self.waited += seconds

    @property
    def seconds_left(self) -> float:
        """The time that remains for progress; 0 if it is over."""
        return max(0.0, self.seconds - self.waited)

    def require_time(self, host: str) -> None:
        """Raise HubUnreachable if the time for progress is over. `host`: what was waited for."""
        if not self.seconds_left:
            raise HubUnreachable(
                f"{host} has sent only {self.received:,} bytes in {self.seconds:g} seconds",
                hint=f"check the network, or {RETRY_HINT}",
            )


class HubReply:
    """The response to a request. `steps`: the headers of all responses, redirects first."""

    def __init__(
        self,
        receiver: "_Receiver",
        response: "httpx2.Response",
        clock: ProgressClock,
        steps: "tuple[httpx2.Headers, ...]",
    ) -> None:
        self._receiver, self._response, self._clock = receiver, response, clock
        self.status, self.headers, self.steps = response.status_code, response.headers, steps
        self.url, self.host = str(response.url), response.url.host

    def require_status(self, *statuses: int) -> None:
        """Raise RefusedRequest if the response has another status."""
        if self.status not in statuses:
            raise RefusedRequest(self)

    def chunks(self) -> Iterator[bytes]:
        """Yield the body in chunks as they arrive. Raises an httpx2.TransportError if the connection
        breaks or is silent, and HubUnreachable if the body is compressed, or the clock's time is
        over.
        """
        if self.headers.get("content-encoding", "identity") != "identity":
            raise HubUnreachable(
                f"{self.host} sends a compressed body, which was not requested",
                hint="check HF_ENDPOINT and the proxy settings",
            )
        while chunk := self._receiver.wait_for_item(TIMEOUT_SECONDS, self._clock, self.host):
            self._clock.add_bytes(len(chunk))
            yield chunk


@contextmanager
def open_reply(
    url: str, headers: Mapping[str, str], clock: ProgressClock, *, method: str = "GET"
) -> Iterator[HubReply]:
    """Send a request, follow redirects, and yield the response. A connection whose body is not read
    completely in the block is closed. Other hosts do not receive the user's token.

    Raises an httpx2.TransportError if no response arrives, and HubUnreachable for invalid or too
    many redirects, or if the clock's time is over.
    """
    receiver = _Receiver(method, url, headers)
    receiver.start()
    try:
        response, steps = receiver.wait_for_item(REPLY_SECONDS, clock, receiver.host)
        yield HubReply(receiver, response, clock, steps)
    finally:
        receiver.stop()


def read_document(
    url: str, headers: Mapping[str, str], clock: ProgressClock, max_bytes: int
) -> bytes:
    """Return the body of a complete response. Raises as `open_reply` and `HubReply.chunks` do,
    RefusedRequest for another status, and HubUnreachable if the body has more than `max_bytes`
    bytes.
    """
    with open_reply(url, headers, clock) as reply:
        reply.require_status(*COMPLETE_STATUSES)
        body = bytearray()
        for chunk in reply.chunks():
            body += chunk
            if len(body) > max_bytes:
                raise HubUnreachable(
                    f"{reply.host} sends more than {max_bytes:,} bytes instead of a list of files",
                    hint="check HF_ENDPOINT and the proxy settings",
                )
    return bytes(body)


class _Receiver(threading.Thread):
    """Sends one request, and puts what it receives into a queue: the response with the headers of
    all steps, then chunks, then b"". An error is put in place of these.

    It is a daemon thread, because a read of a socket cannot always be ended.
    """

    def __init__(self, method: str, url: str, headers: Mapping[str, str]) -> None:
        super().__init__(name="receive", daemon=True)
        self.method, self.url, self.request_headers = method, url, headers
        self.host = url.partition("://")[2].partition("/")[0]
        self._items: deque[Any] = deque()
        self._changed = threading.Condition()
        self._is_stopped = False

    def run(self) -> None:
        """Receive the response until its end, an error, or stop()."""
        try:
            response, steps = self._open()
            with closing(response):
                if not self._put((response, steps)):
                    return
                for chunk in response.iter_raw():
                    if chunk and not self._put(chunk):
                        return
            self._put(b"")
        except BaseException as error:  # noqa: BLE001 (the waiting thread raises it)
            self._put(error)

    def stop(self) -> None:
        """End the thread with the next chunk that it receives."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def wait_for_item(self, seconds: float, clock: ProgressClock, host: str) -> Any:
        """Return the next item of the queue. Raises the error that ended the request,
        httpx2.ReadTimeout after `seconds` seconds, and HubUnreachable if the clock's time is over.
        """
        import httpx2

        limit, started = min(seconds, clock.seconds_left), time.monotonic()
        with self._changed:
            has_item = self._changed.wait_for(lambda: bool(self._items), limit)
            item = self._items.popleft() if has_item else None
            self._changed.notify_all()
        clock.add_wait(min(limit, time.monotonic() - started))
        if not has_item:
            clock.require_time(host)
            raise httpx2.ReadTimeout(f"no byte in {seconds:g} seconds")
        if isinstance(item, BaseException):
            raise item
        return item

    def _put(self, item: Any) -> bool:
        """Append an item when the queue has space. Return False if the thread shall end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_stopped or len(self._items) < MAX_WAITING_CHUNKS
            )
            self._items.append(item)
            self._changed.notify_all()
            return not self._is_stopped

    def _open(self) -> "tuple[httpx2.Response, tuple[httpx2.Headers, ...]]":
        """Send the request and follow redirects. Return the last response, whose body is not read
        yet, and the headers of all responses.
        """
        import httpx2

        client = _open_client()
        request = client.build_request(
            self.method,
            self.url,
            headers={**self.request_headers, "Accept-Encoding": "identity"},
            timeout=TIMEOUT_SECONDS,
        )
        auth: Any = httpx2.USE_CLIENT_DEFAULT
        steps: list[httpx2.Headers] = []
        while True:
            response = client.send(request, stream=True, follow_redirects=False, auth=auth)
            steps.append(response.headers)
            if not response.has_redirect_location:
                return response, tuple(steps)
            with closing(response):
                _drain(response)
                if len(steps) > MAX_REDIRECTS:
                    raise _bad_redirect(response, f"redirects more than {MAX_REDIRECTS} times")
                if (next_request := response.next_request) is None:
                    raise _bad_redirect(response, "redirects to what is not an address")
                if next_request.url.scheme not in ("http", "https") or not next_request.url.host:
                    raise _bad_redirect(response, "redirects to what is not a web address")
            request, auth = next_request, None


def _open_client() -> "httpx2.Client":
    """Return the client of huggingface_hub, which has the proxy and certificate settings of the
    environment. Raises UserError if these are not valid.
    """
    import httpx2
    from huggingface_hub import get_session

    try:
        return get_session()
    except (ImportError, ValueError, OSError, httpx2.InvalidURL) as error:
        raise UserError(
            f"the proxy or certificate settings cannot be used: {str(error).splitlines()[0]}",
            hint="correct HTTPS_PROXY, ALL_PROXY or SSL_CERT_FILE, or unset it",
        ) from None


def _drain(response: "httpx2.Response") -> None:
    """Read the body of a redirect if it is short, so that the connection can be used again."""
    length = response.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and len(length) < 9 and int(length) <= DRAINED_BYTES:
        for _ in response.iter_raw():
            pass


def _bad_redirect(response: "httpx2.Response", what: str) -> HubUnreachable:
    """Return the error for a redirect that is not followed."""
    return HubUnreachable(
        f"{response.url.host} {what}", hint="check HF_ENDPOINT and the proxy settings"
    )
