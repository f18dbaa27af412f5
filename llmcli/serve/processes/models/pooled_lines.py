"""Answers the lines of batches with the models of a pool: each line goes to the model that it
names.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from llmcli.api.errors import ERROR_TYPES, ApiError, ServerStopping
from llmcli.api.forms.base import Document, encode_json
from llmcli.api.server_settings import ServerSettings
from llmcli.batch.job import LineOutputs, line_seed, streams_refused
from llmcli.batch.request_line import EMBEDDINGS_PATH, BatchRequest
from llmcli.runtime.sampling import RANDOM_SEED
from llmcli.serve.batches.records import StoredBatch
from llmcli.serve.http.api_keys import owner_id
from llmcli.serve.http.exchange import BACKGROUND_KEY
from llmcli.serve.processes.front import TriesLeft, UpstreamLost
from llmcli.serve.processes.models.model_pool import ModelPool

# Tells batches of servers of several models from those of one, which have the hash of the model.
POOL_MARK = "several models"
CLIENT_ADDRESS = "batches"
# Lines in flight. Lines for one model are answered together, so that models which do not fit
# together are not swapped for each line.
PARALLEL_LINES = 16
BUSY_SECONDS = 0.5  # before a line is sent again to a model that was busy


class PooledLines:
    """Answers the lines of batches with the models of a pool."""

    model_name = ""

    def __init__(self, pool: ModelPool, settings: ServerSettings) -> None:
        self.pool, self.settings = pool, settings

    @property
    def is_stopping(self) -> bool:
        """Whether the server stops."""
        return self.pool.state.is_stopping

    def read_model_hash(self) -> str:
        """Return the mark of servers of several models."""
        return POOL_MARK

    def parallel(self, endpoint: str) -> int:
        """Return how many lines for a path are answered at once."""
        return PARALLEL_LINES

    def open(self, batch: StoredBatch, identity: Mapping[str, Any]) -> "_PooledBatch":
        """Return what answers the lines of a batch. `identity`: what its ids are made of."""
        keys = self.settings.keys
        key = next((key for key in keys if owner_id({"x-api-key": key}, keys) == batch.owner), "")
        return _PooledBatch(self, identity, key)


class _PooledBatch:
    """Answers the lines of one batch. `outputs`: makes its output lines. `key`: the API key of its
    client, for whom its requests count; "" if the server has none, or not this one any more.
    """

    def __init__(self, lines: PooledLines, identity: Mapping[str, Any], key: str) -> None:
        self._lines, self._key = lines, key or next(iter(lines.settings.keys), "")
        self.outputs = LineOutputs(identity)

    async def answer(self, request: BatchRequest, client: str) -> Document:
        """Return the document of the answer to a line. Raises ApiError, and ServerStopping."""
        body = dict(request.body)
        if body.pop("stream", None):
            raise streams_refused()
        if request.url != EMBEDDINGS_PATH and body.get("seed") in (None, RANDOM_SEED):
            body["seed"] = line_seed(0, request.custom_id)
        raw, tries_left = encode_json(body), TriesLeft()
        while True:
            try:
                return await self._ask(request.url, raw)
            except UpstreamLost as error:
                tries_left.count(error)
                if not tries_left:
                    raise tries_left.as_error() from None
            except ApiError as error:
                if self._lines.is_stopping:
                    raise ServerStopping from None
                if error.status != 429:
                    raise
                await asyncio.sleep(BUSY_SECONDS)

    async def _ask(self, path: str, raw: bytes) -> Document:
        """Send a request to the model that it names, and return the document of the answer. Raises
        ApiError and UpstreamLost.
        """
        settings = self._lines.settings
        headers = [
            (b"host", f"{settings.host}:{settings.port}".encode()),
            (b"content-type", b"application/json"),
            *([(b"authorization", b"Bearer " + self._key.encode())] if self._key else []),
        ]
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": (CLIENT_ADDRESS, 0),
            "server": (settings.host, settings.port),
            BACKGROUND_KEY: True,
        }
        status, answer = 500, bytearray()
        async for message in self._lines.pool.ask(scope, raw, b""):
            status = message.get("status", status)
            answer += message.get("body", b"")
        document: Document = await asyncio.to_thread(json.loads, bytes(answer))
        if status == 200:
            return document
        error = document["error"]
        fields = {name: error[name] for name in ("param", "code") if error.get(name)}
        raise ApiError(error["message"], status if status in ERROR_TYPES else 500, **fields)
