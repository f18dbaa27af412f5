"""Texts to vectors beside the answers: one request's texts at a time, a pass of them between two steps of the engine.

It knows nothing of HTTP.
"""

import asyncio
from collections.abc import Sequence

from llmcli.errors import UserError
from llmcli.runtime.binding.pooled import Vector
from llmcli.runtime.embedder import Embedder
from llmcli.serve.bridge import Bridge, Busy, Stopping
from llmcli.serve.problems import Problem

MOST_WAITING = 64  # requests
LATER = 2  # seconds that one is asked to come back after

Text = str | Sequence[int]


class Vectors:
    """The embedder of one server, for coroutines of one loop."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge, self._turn = bridge, asyncio.Lock()
        self._open = 0

    async def embedder(self) -> Embedder:
        """What makes them; raises Problem for a model that gives none."""
        try:
            return await self._bridge.call(self._bridge.runner.embedder)
        except Stopping:
            raise
        except UserError as error:
            raise Problem(str(error), 501) from None

    async def embed(self, texts: Sequence[Sequence[int]]) -> list[Vector]:
        """Texts as ids to vectors of length 1; cancelled, it ends after a pass. Raises Busy, Stopping, UserError."""
        bridge = self._bridge
        if bridge.stopping:
            raise Stopping
        if self._open >= MOST_WAITING:
            bridge.meter.refused("busy")
            raise Busy(self._open, LATER)
        embedder = await self.embedder()
        self._open += 1
        try:
            async with self._turn:
                work = embedder.work(texts)
                while await bridge.call(work.step):
                    pass
        finally:
            self._open -= 1
        bridge.meter.embedded(work.tokens)
        return work.vectors
