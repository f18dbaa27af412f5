"""Turns at something that only one coroutine may use at a time, given to clients in rotation."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairTurns:
    """Gives turns to coroutines of one event loop. Clients that wait get a turn one after the other,
    however many turns each of them waits for.
    """

    def __init__(self) -> None:
        self._is_taken = False
        # the coroutines that wait, by client; the client that is next is the first
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Wait for a turn of a client, and have it for the block."""
        if self._is_taken:
            await self._wait(client)
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, client: str) -> None:
        """Wait until _pass_on() gives this coroutine the turn."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the turn was given just before
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give the turn to the next client, if one waits."""
        while self._waiting:
            client = next(iter(self._waiting))
            turns = self._waiting.pop(client)
            turn = turns.popleft()
            if turns:  # the client's next turn comes after those of the other clients
                self._waiting[client] = turns
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._is_taken = False
