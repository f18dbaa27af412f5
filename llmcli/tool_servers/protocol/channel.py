"""What a connection knows about its transport: how much the server has sent, and why it ended."""

import asyncio

from llmcli.tool_servers.limits import MAX_REQUEST_BYTES
from llmcli.tool_servers.tool_result import clean_text

MAX_STRAY_LINES = 100  # lines on a server's standard output that are no messages
MAX_RESUMPTIONS = 100  # of streams that a server closes before the result of a call
MAX_REASON_CHARACTERS = 300
INVALID_ANSWER = "its answer is not what the protocol demands"


class ChannelError(Exception):
    """Raised if a server breaks a limit of its channel. Its text says which one."""


class Channel:
    """Counts what a server sends, and records the end of the connection.

    `n_stray_lines`: lines of its standard output that are no messages. `reason`: why the connection
    ended; "" while it is open, or if it was closed on purpose.
    """

    def __init__(self) -> None:
        self.n_stray_lines = 0
        self.reason = ""
        self._ended = asyncio.Event()
        self._n_bytes = 0
        self._n_resumptions = 0

    def begin_request(self) -> None:
        """Start the counts for a new request."""
        self._n_bytes = 0
        self._n_resumptions = 0

    def count_bytes(self, count: int) -> None:
        """Add bytes that the server sent. Raises ChannelError if they are too many for one
        request.
        """
        self._n_bytes += count
        if self._n_bytes > MAX_REQUEST_BYTES:
            raise ChannelError(f"it sent more than {MAX_REQUEST_BYTES >> 20} MiB at once")

    def count_resumption(self) -> None:
        """Add a stream that the client resumes. Raises ChannelError if they are too many for one
        request.
        """
        self._n_resumptions += 1
        if self._n_resumptions > MAX_RESUMPTIONS:
            raise ChannelError(f"it closed more than {MAX_RESUMPTIONS} streams before the result")

    def count_stray_line(self) -> None:
        """Add a line that is no message. Raises ChannelError if there are too many of them."""
        self.n_stray_lines += 1
        if self.n_stray_lines > MAX_STRAY_LINES:
            raise ChannelError("its standard output is not the protocol's: it has other text")

    def end(self, reason: str = "") -> None:
        """Record that the connection has ended. The first reason stays."""
        if not self._ended.is_set():
            self.reason = shorten_reason(reason)
            self._ended.set()

    @property
    def has_ended(self) -> bool:
        """Whether the connection has ended."""
        return self._ended.is_set()

    async def wait_for_end(self) -> None:
        await self._ended.wait()


def shorten_reason(text: str) -> str:
    """Return a text of a server or of a library as one line of bounded length."""
    return " ".join(clean_text(text[: 4 * MAX_REASON_CHARACTERS]).split())[:MAX_REASON_CHARACTERS]
