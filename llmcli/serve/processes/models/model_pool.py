"""The models of a server that has several: which are offered, and the requests to them.

Each model runs in a process of its own (admitted_process.py). A request for a model that is not
loaded waits until it is. Models are loaded one after another (model_loads.py), in an order that is
fair to all clients (load_turns.py). A model is only loaded when the predicted bytes of all
processes together stay within the limits; for that, idle models are unloaded (memory_room.py), and
busy ones when they are idle, so that two models which do not fit together take turns.

Everything here runs on one event loop.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

from starlette.types import Message

from llmcli.api.errors import ApiError
from llmcli.errors import UserError
from llmcli.serve.processes.models.admitted_process import AdmittedProcess
from llmcli.serve.processes.models.model_loads import ModelLoads
from llmcli.serve.processes.models.model_request import (
    answer_messages,
    progress_messages,
    read_client,
    read_model_request,
)
from llmcli.serve.processes.models.model_watch import drain_missing, watch_models
from llmcli.serve.processes.models.pool_state import PoolSettings, PoolState
from llmcli.serve.processes.models.pooled_model import LoadAbandoned, PooledModel
from llmcli.serve.processes.models.served_models import ServedModel, match_name
from llmcli.serve.serve_request import ServeRequest

PROGRESS_SECONDS = 2.0  # how often a stream that waits for its model gets a sign of life


class ModelPool:
    """The models of a server, as the front server's Upstream. `find_models`: returns the models
    that are offered now; it may wait for the disk. `make_process`: returns a process, not yet
    started, for a model. `note`: receives messages for the user.
    """

    def __init__(
        self,
        find_models: Callable[[], dict[str, ServedModel]],
        make_process: Callable[[ServeRequest], AdmittedProcess],
        settings: PoolSettings,
        note: Callable[[str], None],
    ) -> None:
        self._find_models, self.settings = find_models, settings
        self.state = PoolState(find_models(), settings, note)
        self._loads = ModelLoads(self.state, make_process)

    @property
    def models(self) -> dict[str, PooledModel]:
        """The models by name."""
        return self.state.models

    # --- the life of the pool

    def start(self) -> None:
        """Start to watch the models, and load the pinned ones."""
        self.state.spawn(watch_models(self.state))
        for model in self.models.values():
            if model.served.is_pinned and model.served.path:
                self.state.spawn(self._load_pinned(model))

    async def _load_pinned(self, model: PooledModel) -> None:
        """Load a model at the start of the server. An error was noted when it happened."""
        with suppress(ApiError):
            async with self.use(model, math.inf):
                pass

    async def close(self) -> None:
        """End all processes."""
        self.state.is_stopping = True
        for task in tuple(self.state.tasks):
            task.cancel()
        for model in self.models.values():
            if model.load_task:
                model.load_task.cancel()
            if model.process and model.state == "loading":
                model.process.abort()  # a loaded one saves its states first
        processes = [model.process for model in self.models.values() if model.process]
        await asyncio.gather(*(process.close() for process in processes))

    def stop(self) -> None:
        """Cancel every answer now."""
        self.state.is_stopping = True
        for model in self.models.values():
            if model.process:
                model.process.stop()
        self.state.report_change()

    # --- requests

    async def wait(self, seconds: float) -> str:
        """Return "" at once, because ask() waits for the model."""
        return ""

    async def ask(
        self, scope: dict[str, Any], body: bytes, key: bytes
    ) -> AsyncGenerator[Message, None]:
        """Send a request to the model that it names, which is loaded if needed, as Upstream.ask. A
        stream gets signs of life while it waits for the model.
        """
        request = await read_model_request(scope, body)
        model = await self.find(request.name)
        client = read_client(scope, self.settings.keys)
        acquiring = asyncio.ensure_future(self._acquire(model, client))
        n_sent = 0
        try:
            while not (await asyncio.wait({acquiring}, timeout=PROGRESS_SECONDS))[0]:
                state = "queued" if model.state in ("here", "loaded") else model.state
                for message in progress_messages(request, model.name, state, n_sent):
                    yield message
                n_sent += 1
            process = acquiring.result()
            has_head = n_sent > 0 and request.shows_progress
            async with aclosing(process.ask(scope, body, key)) as messages:
                async for message in answer_messages(messages, has_head):
                    if message["type"] == "http.response.start" and message["status"] < 500:
                        model.n_failures, model.error = 0, ""
                    yield message
        finally:
            if acquiring.done() and not acquiring.cancelled() and not acquiring.exception():
                self._release(model, client, request.keep_alive)
            acquiring.cancel()

    @asynccontextmanager
    async def use(
        self, model: PooledModel, keep_alive: float | None = None, client: str = ""
    ) -> AsyncIterator[AdmittedProcess]:
        """Load a model if needed, and keep it loaded during the `with` block. `keep_alive`: seconds
        for which it stays loaded afterwards; None: the default. Raises ApiError if it cannot be
        loaded.
        """
        process = await self._acquire(model, client)
        try:
            yield process
        finally:
            self._release(model, client, keep_alive)

    async def _acquire(self, model: PooledModel, client: str) -> AdmittedProcess:
        """Load a model if needed, count a request of it, and return its process. Raises
        ApiError.
        """
        ticket = self.state.turns.make_ticket(client)
        model.tickets.append(ticket)
        try:
            if self.state.is_usable(model):
                self.state.grant(model)
            while not ticket.process.done():
                loading = asyncio.create_task(self._loads.wait(model))
                # a request that waits for the model's next turn may get its process before
                waited: set[asyncio.Future[Any]] = {loading, ticket.process}
                try:
                    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                    if loading.done():
                        loading.result()
                finally:
                    loading.cancel()
            return ticket.process.result()
        except BaseException:
            if ticket.process.done():
                self._release(model, client, None)
            raise
        finally:
            if ticket in model.tickets:
                model.tickets.remove(ticket)
                self.state.report_change()

    def _release(self, model: PooledModel, client: str, keep_alive: float | None) -> None:
        """Count a request as ended, and set when the model is unloaded."""
        model.release(client, self.state.keep_alive(model, keep_alive))
        if model.tickets and self.state.is_usable(model):
            self.state.grant(model)
        self.state.report_change()

    # --- models

    async def find(self, requested: str | None) -> PooledModel:
        """Return the model that a request names. Raises ApiError if there is none."""
        if requested is None:
            requested = self.settings.default_name
        if requested is None and len(self.models) == 1:
            requested = next(iter(self.models))
        if requested is None:
            names = ", ".join(sorted(self.models))
            raise ApiError(f"name a model: {names or 'none is here'}", param="model")
        name = match_name(requested, self._offered())
        if name is None or self.models[name].served.stamp is None:
            await self.refresh()
            name = match_name(requested, self._offered())
        if name is None:
            raise ApiError(
                f"there is no model {requested[:100]!r} here;"
                f" available: {', '.join(sorted(self._offered())) or 'none'}",
                404,
                param="model",
                code="model_not_found",
            )
        return self.models[name]

    def _offered(self) -> Mapping[str, ServedModel]:
        """Return the models that can be named."""
        return {name: model.served for name, model in self.models.items() if model.is_offered}

    async def refresh(self) -> None:
        """Look for models that have come and gone since the last time."""
        try:
            found = await asyncio.to_thread(self._find_models)
        except UserError as error:
            self.state.note(f"the list of models is unchanged: {error}")
            return
        for name, served in found.items():
            if name in self.models:
                self.models[name].served, self.models[name].is_offered = served, True
            else:
                self.models[name] = PooledModel(served)
        for name in tuple(self.models):
            model = self.models[name]
            model.is_offered = name in found
            if name not in found and model.state == "here" and not model.n_waiting:
                del self.models[name]
            elif name not in found:
                drain_missing(self.state, model)

    async def unload(self, model: PooledModel) -> bool:
        """Unload a model when it is idle, and wait for it. Return whether it was loaded. Raises
        ApiError for a pinned model.
        """
        if model.served.is_pinned:
            raise ApiError(f"{model.name} is pinned: it stays loaded", 409)
        # the task of a loaded one waits for as long as further requests do
        if model.state != "loaded" and model.load_task and not model.load_task.done():
            with suppress(ApiError, LoadAbandoned):
                await asyncio.shield(model.load_task)
        if model.state != "loaded":
            return False
        model.drains_for = "a request"
        gone = model.gone
        self.state.report_change()
        await gone.wait()
        return True
