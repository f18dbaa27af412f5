"""Embeddings beside answers: the texts of one request at a time, one pass of them between two steps
of the engine.

It knows nothing of HTTP.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from llmcli.errors import UserError
from llmcli.hardware import host
from llmcli.runtime.binding.pooled import Vector
from llmcli.runtime.embedder import Embedder, Work
from llmcli.runtime.runner import Runner
from llmcli.serve.bridge import Bridge, Busy, Stopping
from llmcli.serve.problems import Problem
from llmcli.units import size

MOST_WAITING = 64  # requests
LATER = 2  # seconds that one is asked to come back after

T = TypeVar("T")
Text = str | Sequence[int]


def _step(runner: Runner, work: Work) -> bool:
    runner.embedder().gentle = runner.engine.busy
    return work.step()


def _make_room(runner: Runner, tokens: int) -> None:
    """Make the context, or a larger one; raises UserError where the machine has no memory for it."""
    embedder, report = runner.embedder(), runner.kv_report()
    room = embedder.wanted(tokens)
    if room == embedder.room:
        return
    cache = runner.predict(report.type_k, report.type_v, room) if embedder.looks_back else None
    wanted = (cache.nbytes if cache else 0) + (report.compute_bytes or 0)
    free = host.available_memory()
    if free is not None and wanted > free:
        what = f"a text of {tokens} tokens takes {size(wanted)} of memory, {size(free)} are free"
        raise UserError(what, hint="send shorter ones")
    embedder.pooled(tokens)


class Vectors:
    """The embedder of one server, for coroutines of one loop."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge, self._turn = bridge, asyncio.Lock()
        self._open = 0

    async def embedder(self) -> Embedder:
        """What makes them; raises Problem for a model that gives none."""
        return await self._call(self._bridge.runner.embedder, 501)

    async def embed(self, texts: Sequence[Sequence[int]]) -> list[Vector]:
        """Texts as ids to vectors of length 1; cancelled, it ends after a pass. Raises Busy,
        Stopping, UserError.
        """
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
                await self._call(partial(_make_room, bridge.runner, max(map(len, texts))), 503)
                while await self._call(partial(_step, bridge.runner, work), 503):
                    pass
        finally:
            self._open -= 1
        bridge.meter.embedded(work.tokens)
        return work.vectors

    async def _call(self, function: Callable[[], T], status: int) -> T:
        """On the engine's thread; what it refuses has this status."""
        try:
            return await self._bridge.call(function)
        except Stopping:
            raise
        except UserError as error:
            raise Problem(str(error), status) from None
