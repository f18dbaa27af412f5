"""An HTTP client for callers without an event loop. Its requests run on a thread, so that the bytes
of a stream get the time of their arrival, whatever the caller does meanwhile.
"""

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

from llmcli.http_client.client import (
    ConnectionSettings,
    HttpClient,
    RequestError,
    open_http_client,
)

MAX_STREAM_BYTES = 1 << 28  # of a stream, which is more than any answer has
IDLE_SECONDS = 600.0  # a server that sends nothing for so long has failed
T = TypeVar("T")


class BackgroundStream:
    """The body of a response to a posted request. Iterate over it to get the pieces of the body as
    they arrive. `stop` may be called from any thread.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, client: HttpClient, url: str, body: bytes
    ) -> None:
        self._items: SimpleQueue[tuple[float, bytes] | None] = SimpleQueue()
        self._future = asyncio.run_coroutine_threadsafe(self._receive(client, url, body), loop)
        self._future.add_done_callback(lambda _: self._items.put(None))

    def __iter__(self) -> Iterator[tuple[float, bytes]]:
        """Yield each piece of the body with the `time.perf_counter()` of its arrival, until the
        body ends or `stop` is called. Raises RequestError.
        """
        while (item := self._items.get()) is not None:
            yield item
        if not self._future.cancelled():
            self._future.result()

    def stop(self) -> None:
        """Close the connection, which cancels the request, and end the iteration."""
        self._future.cancel()

    async def _receive(self, client: HttpClient, url: str, body: bytes) -> None:
        """Put the pieces of the body into the queue. Raises RequestError."""
        loop, n_bytes = asyncio.get_running_loop(), 0
        try:
            async with asyncio.timeout(IDLE_SECONDS) as idle, client.stream(url, body) as response:
                try:
                    async for piece in response.pieces():
                        idle.reschedule(loop.time() + IDLE_SECONDS)
                        self._items.put((time.perf_counter(), piece))
                        n_bytes += len(piece)
                        if n_bytes > MAX_STREAM_BYTES:
                            raise RequestError("bad stream", "the answer does not end")
                finally:
                    response.close()
        except TimeoutError:
            message = f"the server sent nothing for {IDLE_SECONDS:.0f} seconds"
            raise RequestError("timeout", message) from None


class BackgroundClient:
    """Sends requests to servers from a thread with its own event loop."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="http client", daemon=True
        )
        self._thread.start()
        self._context = open_http_client(settings)
        try:
            self._client = self._run(self._context.__aenter__())
        except BaseException:
            self._end_thread()
            raise

    def fetch_json(self, url: str, timeout_seconds: float) -> dict[str, Any]:
        """Get the JSON object at a URL. Raises RequestError, also after `timeout_seconds`."""

        async def fetch() -> dict[str, Any]:
            try:
                async with asyncio.timeout(timeout_seconds):
                    return await self._client.fetch_json(url)
            except TimeoutError:
                raise RequestError("timeout", f"no answer in {timeout_seconds:g} seconds") from None

        return self._run(fetch())

    def post(self, url: str, body: bytes) -> BackgroundStream:
        """Post a body, and return its response, whose errors appear when it is read."""
        return BackgroundStream(self._loop, self._client, url, body)

    def close(self) -> None:
        """Close all connections and end the thread."""
        try:
            self._run(self._close_client())
        finally:
            self._end_thread()

    async def _close_client(self) -> None:
        """Cancel the requests that still run, and close the connections."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._context.__aexit__(None, None, None)

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the thread and return its result. An exception in the caller's
        thread, such as KeyboardInterrupt, cancels it.
        """
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


@contextmanager
def open_background_client(settings: ConnectionSettings) -> Iterator[BackgroundClient]:
    """Open a client for the `with` block. Raises UserError for a certificate file that cannot be
    read.
    """
    client = BackgroundClient(settings)
    try:
        yield client
    finally:
        client.close()
