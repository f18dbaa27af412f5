"""Computes embeddings on a server that may also generate text, one batch between two steps of the
engine. The clients that wait take turns, each with a few texts, and each has a share of the queue.
"""

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
from llmcli.serve.engine_thread.client_shares import ClientShares
from llmcli.serve.engine_thread.fair_turns import FairTurns

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
        self._bridge, self._turns = bridge, FairTurns()
        self._shares = ClientShares(MAX_WAITING)

    async def embedder(self) -> Embedder:
        """Return the model's embedder. Raises ApiError (501) if the model cannot compute
        embeddings.
        """
        return await self._call(self._bridge.runner.embedder, 501)

    async def embed(
        self, texts: Sequence[Sequence[int]], client: str, norm: int = EUCLIDEAN
    ) -> list[Vector]:
        """Return a vector for each text (see EmbeddingJob; a reranker's vector is its score).
        `texts`: the token ids of each text. `client`: the id of the client. `norm`: see normalize.
        If the caller is canceled, the current batch is still computed.

        Raises ServerBusy, ServerStopping or ApiError.
        """
        bridge = self._bridge
        if bridge.is_stopping:
            raise ServerStopping
        if not self._shares.take_places(client):
            bridge.metrics.record_rejection("busy")
            raise ServerBusy(self._shares.n_open, RETRY_AFTER_SECONDS)
        try:
            embedder = await self.embedder()
            async with self._turns.turn(client):
                embedder.check_texts(texts)
                await self._call(
                    partial(open_embedding_context, bridge.runner, max(map(len, texts))), 503
                )
                groups = list(embedder.groups(texts))
            jobs: list[EmbeddingJob] = []
            for group in groups:
                jobs.append(embedder.start_job([texts[index] for index in group], norm))
                async with self._turns.turn(client):
                    await self._finish(jobs[-1], embedder)
        finally:
            self._shares.return_places(client)
        bridge.metrics.record_embedding(
            sum(job.tokens for job in jobs), sum(job.n_passes for job in jobs)
        )
        return [vector for job in jobs for vector in job.vectors]

    async def _finish(self, job: EmbeddingJob, embedder: Embedder) -> None:
        """Compute all batches of a job."""
        n_rows = embedder.pass_tokens
        while await self._call(partial(_step, self._bridge.runner, job), 503, n_rows):
            pass

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
