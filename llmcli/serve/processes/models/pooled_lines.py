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
from llmcli.serve.processes.front import TriesLeft, UpstreamLost, call_scope, post_scope
from llmcli.serve.processes.models.model_pool import ModelPool

# Tells batches of servers of several models from those of one, which have the hash of the model.
POOL_MARK = "several models"
CLIENT_ADDRESS = "batches"
ERROR_FIELDS = ("type", "param", "code", "hint")  # of a model's error, besides its message
# Lines in flight. Lines for one model are answered together, so that models which do not fit
# together are not swapped for each line.
PARALLEL_LINES = 16
BUSY_SECONDS = 0.5  # before a line is sent again to a model that was busy
# A line waits so often, and so long each time, for a model that is not available: longer together
# than the longest delay before a model that has failed is tried again.
MAX_WAITS, WAIT_SECONDS = 10, 20.0


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
        self._lines, self._key = lines, key
        self.outputs = LineOutputs(identity)
        # Models for which a line has waited in vain, so that thousands do not wait one after another.
        self._given_up: set[str] = set()

    async def answer(self, request: BatchRequest, client: str) -> Document:
        """Return the document of the answer to a line. Raises ApiError, and ServerStopping."""
        if self._lines.settings.keys and not self._key:
            # another client must not answer for it
            raise ApiError(
                "this server does not take the key of the batch any more",
                401,
                code="invalid_api_key",
            )
        body = dict(request.body)
        if body.pop("stream", None):
            raise streams_refused()
        if request.url != EMBEDDINGS_PATH and body.get("seed") in (None, RANDOM_SEED):
            body["seed"] = line_seed(0, request.custom_id)
        raw, tries_left, waits_left = encode_json(body), TriesLeft(), MAX_WAITS
        name = str(body.get("model"))
        while True:
            try:
                document = await self._ask(request.url, raw)
                self._given_up.discard(name)
                return document
            except UpstreamLost as error:
                tries_left.count(error)
                if not tries_left:
                    raise tries_left.as_error() from None
            except ApiError as error:
                if self._lines.is_stopping:
                    raise ServerStopping from None
                if error.status == 503 and waits_left and name not in self._given_up:
                    waits_left -= 1
                    await asyncio.sleep(WAIT_SECONDS)
                elif error.status == 429:
                    await asyncio.sleep(BUSY_SECONDS)
                else:
                    if error.status == 503:
                        self._given_up.add(name)
                    raise

    async def _ask(self, path: str, raw: bytes) -> Document:
        """Send a request to the model that it names, and return the document of the answer. Raises
        ApiError and UpstreamLost.
        """
        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        scope = post_scope(call_scope(self._lines.settings, CLIENT_ADDRESS, headers), path)
        scope[BACKGROUND_KEY] = True
        status, answer = 500, bytearray()
        async for message in self._lines.pool.ask(scope, raw, b""):
            status = message.get("status", status)
            answer += message.get("body", b"")
        document: Document = await asyncio.to_thread(json.loads, bytes(answer))
        if status == 200:
            return document
        error = document["error"]
        fields = {name: error[name] for name in ERROR_FIELDS if error.get(name)}
        raise ApiError(error["message"], status if status in ERROR_TYPES else 500, **fields)
