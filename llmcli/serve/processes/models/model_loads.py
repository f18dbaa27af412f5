"""Loads the models of a pool, one after another: plans each, waits for room, and opens it."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from llmcli.api.errors import ApiError
from llmcli.errors import UserError
from llmcli.model_loader.earlier_load import EarlierLoad
from llmcli.runtime.binding.placement.devices import HOST_DEVICE
from llmcli.serve.processes.model_process import ProcessEnded
from llmcli.serve.processes.models.admitted_process import AdmittedProcess
from llmcli.serve.processes.models.memory_room import MemoryRoom
from llmcli.serve.processes.models.pool_state import PoolState
from llmcli.serve.processes.models.pooled_model import LoadAbandoned, PooledModel
from llmcli.serve.serve_request import ServeRequest
from llmcli.units import format_size

# What a process counts until its model is planned: the interpreter with its libraries.
PLANNING_BYTES = 256 << 20
# delays before another try if the process of a load ends without an error, as if it was killed
LOAD_RETRY_SECONDS = (0.0, 1.0)


class ModelLoads:
    """The loads of a pool. `make_process`: returns a process, not yet started, for a model."""

    def __init__(
        self, state: PoolState, make_process: Callable[[ServeRequest], AdmittedProcess]
    ) -> None:
        self._state, self._make_process = state, make_process
        self._room = MemoryRoom(state)

    async def wait(self, model: PooledModel) -> None:
        """Start to load a model if this has not happened, and wait for it. Raises ApiError."""
        if self._state.is_stopping:
            raise ApiError("the server is stopping", 503)
        if model.load_task is None or model.load_task.done():
            model.raise_failure()
            model.load_task = asyncio.create_task(self._load(model))
            model.load_task.add_done_callback(_read_exception)
        with suppress(LoadAbandoned):
            # One client that leaves must not end the load of the others.
            await asyncio.shield(model.load_task)

    async def _load(self, model: PooledModel) -> None:
        """Load a model when it is its turn, unless it is loaded and takes all requests that wait for
        it. Raises ApiError, and LoadAbandoned.
        """
        if await self._serve_loaded(model):
            return
        if model.state == "here":
            model.state = "queued"
        try:
            await asyncio.sleep(max(0.0, model.retry_at - time.monotonic()))
            async with self._state.turns.turn(model):
                await self._take_turn(model)
        except ApiError as error:
            self._record_failure(model, str(error), error.more.get("hint") or "")
            raise
        except UserError as error:
            self._record_failure(model, str(error), error.hint or "")
            raise ApiError(
                f"{model.name} is not available: {error}",
                503,
                code="model_unavailable",
                hint=error.hint,
            ) from None
        finally:
            if model.state in ("queued", "loading"):
                await self._discard(model)
            self._state.grant_usable()  # fewer models wait for their turn now

    async def _serve_loaded(self, model: PooledModel) -> bool:
        """Give a loaded model to the requests that wait for it, as many at a time as it takes. Return
        whether none is left; otherwise its process ends.
        """
        while self._state.is_usable(model) and not self._state.is_stopping:
            self._state.grant(model)
            if not model.tickets:
                return True
            # A turn would give it nothing, and would delay models that must be loaded.
            await self._state.next_change()
        return self._state.is_stopping

    async def _take_turn(self, model: PooledModel) -> None:
        """Load a model whose turn it is, or give it to further requests. Raises UserError and
        LoadAbandoned.
        """
        if not model.is_wanted:
            raise LoadAbandoned
        self._state.report_change()
        while model.state in ("loaded", "unloading"):
            if self._state.is_usable(model):
                self._state.grant(model)
                return
            if not model.is_wanted:  # other models need the turn
                raise LoadAbandoned
            await self._state.next_change()
        model.state = "queued"
        started = time.perf_counter()
        await self._admit_and_open(model)
        model.load_seconds = time.perf_counter() - started

    async def _admit_and_open(self, model: PooledModel) -> None:
        """Load a model, and again if its process is killed meanwhile. Raises UserError and
        LoadAbandoned.
        """
        for delay in (*LOAD_RETRY_SECONDS, None):
            try:
                await self._admit(model)
                await self._open(model)
                return
            except ProcessEnded as error:
                model.n_crashes += 1
                if delay is None:
                    raise
                self._state.note(f"{model.name} was lost while it was loaded: {error}")
                await self._discard(model)
                model.state = "queued"
                await asyncio.sleep(delay)
            if not model.is_wanted:
                raise LoadAbandoned

    async def _admit(self, model: PooledModel) -> None:
        """Start the process of a model, and reserve its memory. Raises UserError and
        LoadAbandoned.
        """
        stamp = model.served.stamp
        if stamp is None:
            raise UserError(
                f"{model.name} is not on this disk",
                hint=f"llmcli pull {model.served.request.ref}",
            )
        if (model.stamp, model.planned_request) != (stamp, model.served.request):
            model.memory, model.passes, model.stamp = None, None, stamp
            model.planned_request = model.served.request
        if model.memory is None:
            await self._room.reserve(model, {HOST_DEVICE: PLANNING_BYTES})
            await self._plan(model)
            if not self._room.has_room(model):
                await self._discard(model)  # its process takes memory that others may need
                model.state = "queued"
        await self._room.reserve(model, self._room.bytes_to_reserve(model))
        if model.process is None:
            await self._plan(model)
            await self._room.reserve(model, self._room.bytes_to_reserve(model))

    async def _plan(self, model: PooledModel) -> None:
        """Start the process of a model, which plans its memory unless it was planned with the same
        limits before. Raises UserError.
        """
        model.state = "loading"
        model.process = self._make_process(model.served.request)
        limits = self._room.limits_of_plan(model)
        if model.memory is not None and limits == model.plan_limits:
            earlier = EarlierLoad(model.memory, model.passes)
            await asyncio.to_thread(model.process.start, limits, earlier)
            return
        model.memory = await asyncio.to_thread(model.process.plan, limits)
        model.plan_limits = limits
        self._state.set_device_limits(model.memory.devices_free)

    async def _open(self, model: PooledModel) -> None:
        """Load an admitted model in its process, and give it to its requests. Raises UserError."""
        process = model.process
        assert process is not None
        model.state = "loading"
        await asyncio.to_thread(process.load, model.reserved_bytes)
        model.gone = asyncio.Event()
        self._state.spawn(self._watch_process(model, process))
        await process.wait_until_available()
        if model.process is not process:
            raise ProcessEnded("its process ended as soon as it was loaded")
        model.state, model.error, model.drains_for = "loaded", "", ""
        self._state.extend_use(model)
        model.n_loads += 1
        model.passes = process.measured_passes
        self._state.grant(model)
        sizes = [
            f"{format_size(nbytes)} of {format_size(self._state.limits[device])}"
            + ("" if device == HOST_DEVICE else f" on {device}")
            for device, nbytes in model.reserved.items()
        ]
        self._state.note(f"{model.name} is loaded: {', '.join(sizes)}")
        self._state.report_change()

    async def _watch_process(self, model: PooledModel, process: AdmittedProcess) -> None:
        """Wait until the process of a loaded model has ended, expected or not."""
        reason = await process.serve()
        is_crash = model.state == "loaded"
        await process.close()
        model.process, model.reserved, model.state, model.drains_for = None, {}, "here", ""
        model.gone.set()
        if is_crash and not self._state.is_stopping:
            model.n_crashes += 1
            model.record_failure(reason, "", is_crash=True)
            self._state.note(f"{model.name} was lost: {reason}")
        self._state.report_change()

    def _record_failure(self, model: PooledModel, message: str, hint: str) -> None:
        """Keep an error of a model, and note it for the user if it is new."""
        if message != model.error:
            self._state.note(f"{model.name}: {message}" + (f" ({hint})" if hint else ""))
        model.record_failure(message, hint)
        model.plan_limits = {}  # other programs may have taken memory since the plan

    async def _discard(self, model: PooledModel) -> None:
        """End the process of a model that is not loaded."""
        if model.process is not None:
            model.process.abort()
            await model.process.close()
        model.process, model.reserved = None, {}
        model.state = "here"
        self._state.report_change()


def _read_exception(task: "asyncio.Task[None]") -> None:
    """Mark the error of a load as read, because all clients that waited may have left."""
    if not task.cancelled():
        task.exception()
