"""Embeddings beside answers: the texts of one request at a time, one pass between two steps of the
engine.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from llmcli.api.errors import Busy, Problem, Stopping
from llmcli.errors import UserError
from llmcli.hardware import host
from llmcli.runtime.binding.pooled_context import Vector
from llmcli.runtime.runner import Runner
from llmcli.runtime.scoring.embedder import Embedder, Work
from llmcli.serve.engine_thread.bridge import Bridge
from llmcli.units import size

MOST_WAITING = 64  # requests
LATER = 2  # seconds of Retry-After

T = TypeVar("T")


def _step(runner: Runner, work: Work) -> bool:
    runner.embedder().gentle = runner.engine.busy
    return work.step()


def _make_room(runner: Runner, tokens: int) -> None:
    """Create the embedding context, or a larger one. Raises UserError if the machine lacks
    memory.
    """
    embedder, report = runner.embedder(), runner.kv_report()
    n_tokens = embedder.wanted(tokens)
    if n_tokens == embedder.room:
        return
    cache = runner.predict(report.type_k, report.type_v, n_tokens) if embedder.looks_back else None
    needed = (cache.nbytes if cache else 0) + (report.compute_bytes or 0)
    free = host.available_memory()
    if free is not None and needed > free:
        message = f"a text of {tokens} tokens needs {size(needed)} of memory, {size(free)} are free"
        raise UserError(message, hint="send shorter texts")
    embedder.pooled(tokens)


class Vectors:
    """The embedding queue of one server, for coroutines of one event loop."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge, self._turn = bridge, asyncio.Lock()
        self._open = 0

    async def embedder(self) -> Embedder:
        """Return the embedder. Raises ApiError for a model that has no embeddings."""
        return await self._call(self._bridge.runner.embedder, 501)

    async def embed(self, texts: Sequence[Sequence[int]]) -> list[Vector]:
        """Return vectors of length 1 for texts given as token ids, each `[embedding_size]`. If
        cancelled, it ends after a pass. Raises ServerBusy, ServerStopping or UserError.
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
        """Return what `function` returns on the engine's thread; a UserError gets this status."""
        try:
            return await self._bridge.call(function)
        except Stopping:
            raise
        except UserError as error:
            raise Problem(str(error), status) from None
