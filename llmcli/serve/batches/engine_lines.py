"""Answers the lines of batches with the model of this process."""

import asyncio
from collections.abc import Mapping
from typing import Any

from llmcli.api import embeddings
from llmcli.api.errors import ServerBusy
from llmcli.api.forms.base import ApiForm, Document
from llmcli.api.server_settings import ServerSettings
from llmcli.batch.job import BatchJob, BatchRules
from llmcli.batch.request_line import EMBEDDINGS_PATH, BatchRequest
from llmcli.runtime import kv_state_file
from llmcli.serve.batches.records import StoredBatch
from llmcli.serve.engine_thread.bridge import EngineBridge
from llmcli.serve.engine_thread.document_stream import answer_in_background
from llmcli.serve.engine_thread.embedding_queue import EmbeddingQueue

BUSY_SECONDS = 0.5  # before texts are sent again to an embedding queue that was full
EMBEDDED_TEXTS = 16  # texts of a line that are embedded at once


class EngineLines:
    """Answers the lines of batches with one engine."""

    def __init__(
        self, bridge: EngineBridge, embedding_queue: EmbeddingQueue, settings: ServerSettings
    ) -> None:
        self.bridge, self.embedding_queue, self.settings = bridge, embedding_queue, settings

    @property
    def model_name(self) -> str:
        """The name of the model."""
        return self.settings.model_name

    @property
    def is_stopping(self) -> bool:
        """Whether the engine takes no more requests."""
        return self.bridge.is_stopping

    def read_model_hash(self) -> str:
        """Return the hash of the model's contents, or its name if it has none."""
        identity = kv_state_file.state_identity(self.bridge.runner)
        return identity.model if identity else self.settings.model_name

    def parallel(self, endpoint: str) -> int:
        """Return how many lines for a path are answered at once."""
        return 1 if endpoint == EMBEDDINGS_PATH else self.bridge.parallel

    def open(self, batch: StoredBatch, identity: Mapping[str, Any]) -> "_EngineBatch":
        """Return what answers the lines of a batch. `identity`: what its ids are made of."""
        return _EngineBatch(self, identity)


class _EngineBatch:
    """Answers the lines of one batch. `outputs`: makes its output lines."""

    def __init__(self, lines: EngineLines, identity: Mapping[str, Any]) -> None:
        self._bridge, self._embedding_queue = lines.bridge, lines.embedding_queue
        self._settings = lines.settings
        self.outputs = BatchJob(self._bridge.runner, BatchRules(self._settings), identity)

    async def answer(self, request: BatchRequest, client: str) -> Document:
        """Return the document of the answer to a line. Raises UserError."""
        if request.url == EMBEDDINGS_PATH:
            return await self._embed(request, client)
        bridge = self._bridge
        form: ApiForm = await bridge.run_in_worker(self.outputs.build_form, request)
        if form.constraint:
            await bridge.run_in_worker(form.compile_constraint, kind="grammars")
        return await answer_in_background(bridge, form, client)

    async def _embed(self, line_request: BatchRequest, client: str) -> Document:
        """Return the document of the embeddings of a line. A few texts are computed at a time, so
        that clients wait only for these.
        """
        body = self.outputs.without_other_model(dict(line_request.body))
        request = embeddings.EmbeddingsRequest(body, self._settings)
        embedder = await self._embedding_queue.embedder()
        length = request.vector_length(embedder)
        embeddings.refuse_token_vectors(embedder)
        ids = await self._bridge.run_in_worker(
            embeddings.encode_texts, request.texts, embedder, request.shortening, kind="texts"
        )
        vectors: list[Any] = []
        while len(vectors) < len(ids):
            texts = ids[len(vectors) : len(vectors) + EMBEDDED_TEXTS]
            try:
                vectors += await self._embedding_queue.embed(texts, client, request.norm)
            except ServerBusy:
                await asyncio.sleep(BUSY_SECONDS)
        return request.build_document(ids, vectors, length)
