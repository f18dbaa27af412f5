"""Computes embeddings on a server that may also generate text. The texts of one request are
computed at a time, one batch between two steps of the engine.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from llmcli.api.errors import ApiError, ServerBusy, ServerStopping
from llmcli.errors import UserError
from llmcli.planning.embedding_context import open_embedding_context
from llmcli.runtime.binding.contexts.pooled_context import Vector
from llmcli.runtime.runner import Runner
from llmcli.runtime.scoring.embedder import EUCLIDEAN, Embedder, EmbeddingJob
from llmcli.serve.engine_thread.bridge import EngineBridge

MAX_WAITING = 64  # requests
RETRY_AFTER_SECONDS = 2  # seconds of Retry-After

T = TypeVar("T")


def _step(runner: Runner, job: EmbeddingJob) -> bool:
    """Compute the next batch of a job. Return whether more batches follow. While answers are being
    generated, batches are short, so that they do not delay tokens. Runs on the engine's thread.
    """
    runner.embedder().uses_short_passes = runner.engine.is_busy
    return job.step()


class EmbeddingQueue:
    """The embedding queue of one server. Its methods are called on one event loop."""

    def __init__(self, bridge: EngineBridge) -> None:
        self._bridge, self._lock = bridge, asyncio.Lock()
        self._open = 0

    async def embedder(self) -> Embedder:
        """Return the model's embedder. Raises ApiError (501) if the model cannot compute
        embeddings.
        """
        return await self._call(self._bridge.runner.embedder, 501)

    async def embed(self, texts: Sequence[Sequence[int]], norm: int = EUCLIDEAN) -> list[Vector]:
        """Return a vector for each text (see EmbeddingJob; a reranker's vector is its score).
        `texts`: the token ids of each text. `norm`: see normalize. If the caller is canceled, the
        current batch is still computed.

        Raises ServerBusy, ServerStopping or ApiError.
        """
        bridge = self._bridge
        if bridge.is_stopping:
            raise ServerStopping
        if self._open >= MAX_WAITING:
            bridge.metrics.record_rejection("busy")
            raise ServerBusy(self._open, RETRY_AFTER_SECONDS)
        embedder = await self.embedder()
        self._open += 1
        try:
            async with self._lock:
                job = embedder.start_job(texts, norm)
                await self._call(
                    partial(open_embedding_context, bridge.runner, max(map(len, texts))), 503
                )
                n_rows = embedder.pass_tokens
                while await self._call(partial(_step, bridge.runner, job), 503, n_rows):
                    pass
        finally:
            self._open -= 1
        bridge.metrics.record_embedding(job.tokens, job.n_passes)
        return job.vectors

    async def _call(self, function: Callable[[], T], status: int, max_rows: int = 0) -> T:
        """Run a function on the engine's thread and return its result. A UserError becomes an
        ApiError with this status. `max_rows`: rows of a pass that the function computes, at most.
        """
        try:
            return await self._bridge.run_on_engine_thread(function, max_rows=max_rows)
        except ServerStopping:
            raise
        except UserError as error:
            raise ApiError(str(error), status) from None
