"""The models of a server that has several: which are loaded, and the requests that wait for one.

Each model runs in a process of its own (admitted_process.py). A request for a model that is not
loaded waits until it is. Loads happen one after another, in the order of their first requests. A
model is only loaded when the predicted bytes of all processes together stay within the limit; for
that, idle models are unloaded (admission.py). If idle ones are not enough, busy ones get no further
requests until they are idle and unloaded. Requests that arrive for them meanwhile wait for their
turn, so that two models which do not fit together take turns.

Everything here runs on one event loop.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.types import Message

from llmcli.api.errors import ApiError
from llmcli.errors import UserError
from llmcli.model_loader.planned_memory import PlannedMemory
from llmcli.serve.processes.model_process import ProcessEnded
from llmcli.serve.processes.models.admission import Resident, choose_unloads
from llmcli.serve.processes.models.admitted_process import AdmittedProcess
from llmcli.serve.processes.models.model_request import (
    answer_messages,
    progress_messages,
    read_model_request,
)
from llmcli.serve.processes.models.served_models import FileStamp, ServedModel, match_name
from llmcli.serve.serve_request import ServeRequest
from llmcli.units import format_size

ModelState = Literal["here", "absent", "queued", "loading", "loaded", "unloading", "failed"]
# What a process counts until its model is planned: the interpreter with its libraries.
PLANNING_BYTES = 256 << 20
MAX_STATES_SHARE = 8  # states of answers get at most this part of the limit for each model
# delays before a model is loaded again, by the number of failures in a row
RETRY_DELAYS_SECONDS = (0.0, 1.0, 5.0, 15.0, 60.0)
MAX_LOAD_TRIES = 3  # of loads in a row whose process ends without an error, as if it was killed
MAX_RETRY_WAIT_SECONDS = 5.0  # requests wait for a delay up to this, and are refused otherwise
PROGRESS_SECONDS = 2.0  # how often a stream that waits for its model gets a comment
ROOM_REASON = "room for "  # why a model drains, before the name of another model
MIN_CHECK_SECONDS, CHECK_SECONDS = 0.01, 2.0  # how often the files of loaded models are looked at


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """The settings of a pool.

    - `limit_bytes`: the most bytes that all models together may take.
    - `keep_alive`: seconds for which an idle model stays loaded.
    - `default_name`: the model of requests that name none; None: they must name one.
    """

    limit_bytes: int
    keep_alive: float
    default_name: str | None = None


@dataclass(slots=True)
class PooledModel:
    """A model of the pool.

    - `is_offered`: requests can name it; not so after it was removed.
    - `reserved_bytes`: what counts for its process now.
    - `memory`: what it takes, once it was planned for `planned_request` in the state `stamp` of its
      file.
    - `n_running`: requests that its process answers; `tickets`: requests that wait for it.
    - `drains_for`: why it gets no further requests; "" if it does.
    - `expires_at`: when it is unloaded if it is idle.
    - `n_failures`: crashes and failed loads in a row; `error`: the last one, with which requests
      are refused until `retry_at`.
    """

    served: ServedModel
    is_offered: bool = True
    state: ModelState = "here"
    reserved_bytes: int = 0
    memory: PlannedMemory | None = None
    stamp: FileStamp | None = None
    planned_request: ServeRequest | None = None
    process: AdmittedProcess | None = None
    n_running: int = 0
    tickets: "list[asyncio.Future[AdmittedProcess]]" = field(default_factory=list)
    drains_for: str = ""
    last_used: float = 0.0
    expires_at: float = math.inf
    n_failures: int = 0
    error: str = ""
    error_hint: str = ""
    retry_at: float = 0.0
    n_loads: int = 0
    n_crashes: int = 0
    load_seconds: float = 0.0
    load_task: "asyncio.Task[None] | None" = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # its process has ended

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.served.name

    @property
    def n_waiting(self) -> int:
        """The number of requests that wait for it."""
        return len(self.tickets)

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests now."""
        return self.state == "loaded" and not self.drains_for

    @property
    def shown_state(self) -> ModelState:
        """The state for people and clients."""
        if self.state == "here" and self.served.path is None:
            return "absent"
        return "failed" if self.state == "here" and self.error else self.state


class _LoadAbandoned(Exception):
    """All clients that waited for a model have disconnected."""


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
        self._find_models, self._make_process = find_models, make_process
        self.settings, self._note = settings, note
        self.models = {name: PooledModel(served) for name, served in find_models().items()}
        self._turn = asyncio.Lock()  # held by the load that happens now
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_stopping = False

    # --- the life of the pool

    def start(self) -> None:
        """Start to watch the models, and load the pinned ones."""
        self._spawn(self._watch_models())
        for model in self.models.values():
            if model.served.is_pinned and model.served.path:
                self._spawn(self._load_pinned(model))

    async def close(self) -> None:
        """End all processes."""
        self._is_stopping = True
        for task in tuple(self._tasks):
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
        self._is_stopping = True
        for model in self.models.values():
            if model.process:
                model.process.stop()
        self._changed.set()

    # --- requests

    async def wait(self, seconds: float) -> str:
        """Return "" at once, because ask() waits for the model."""
        return ""

    async def ask(
        self, scope: dict[str, Any], body: bytes, key: bytes
    ) -> AsyncGenerator[Message, None]:
        """Send a request to the model that it names, which is loaded if needed, as Upstream.ask. A
        stream gets comments while it waits for the model.
        """
        request = await read_model_request(scope, body)
        model = await self.find(request.name)
        acquiring = asyncio.ensure_future(self._acquire(model))
        n_comments = 0
        try:
            while not (await asyncio.wait({acquiring}, timeout=PROGRESS_SECONDS))[0]:
                state = "queued" if model.state == "here" else model.state
                for message in progress_messages(request, model.name, state, n_comments):
                    yield message
                n_comments += 1
            process = acquiring.result()
            async with aclosing(process.ask(scope, body, key)) as messages:
                async for message in answer_messages(messages, has_head=n_comments > 0):
                    if message["type"] == "http.response.start" and message["status"] < 500:
                        model.n_failures, model.error = 0, ""
                    yield message
        finally:
            if acquiring.done() and not acquiring.cancelled() and not acquiring.exception():
                self._release(model, request.keep_alive)
            acquiring.cancel()

    @asynccontextmanager
    async def use(
        self, model: PooledModel, keep_alive: float | None = None
    ) -> AsyncIterator[AdmittedProcess]:
        """Load a model if needed, and keep it loaded during the `with` block. `keep_alive`: seconds
        for which it stays loaded afterwards; None: the default. Raises ApiError if it cannot be
        loaded.
        """
        process = await self._acquire(model)
        try:
            yield process
        finally:
            self._release(model, keep_alive)

    async def _acquire(self, model: PooledModel) -> AdmittedProcess:
        """Load a model if needed, count a request of it, and return its process. Raises
        ApiError.
        """
        ticket: asyncio.Future[AdmittedProcess] = asyncio.get_running_loop().create_future()
        model.tickets.append(ticket)
        try:
            if self._is_usable(model):
                self._grant(model)
            while not ticket.done():
                await self._wait_until_loaded(model)
            return ticket.result()
        except BaseException:
            if ticket.done():
                self._release(model, None)
            raise
        finally:
            if ticket in model.tickets:
                model.tickets.remove(ticket)
                self._changed.set()

    def _grant(self, model: PooledModel) -> None:
        """Give the process of a loaded model to all requests that wait for it. They count at once,
        so that the model is not unloaded before they run.
        """
        assert model.process is not None
        for ticket in model.tickets:
            model.n_running += 1
            ticket.set_result(model.process)
        model.tickets.clear()
        model.last_used = time.monotonic()

    def _release(self, model: PooledModel, keep_alive: float | None) -> None:
        """Count a request as ended, and set when the model is unloaded."""
        model.n_running -= 1
        model.last_used = time.monotonic()
        model.expires_at = model.last_used + self._keep_alive(model, keep_alive)
        self._changed.set()

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

    async def refresh(self) -> None:
        """Look for models that have come and gone since the last time."""
        try:
            found = await asyncio.to_thread(self._find_models)
        except UserError as error:
            self._note(f"the list of models is unchanged: {error}")
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
                self._drain_missing(model)

    async def unload(self, model: PooledModel) -> bool:
        """Unload a model when it is idle, and wait for it. Return whether it was loaded. Raises
        ApiError for a pinned model.
        """
        if model.served.is_pinned:
            raise ApiError(f"{model.name} is pinned: it stays loaded", 409)
        if model.load_task and not model.load_task.done():
            with suppress(ApiError, _LoadAbandoned):
                await asyncio.shield(model.load_task)
        if model.state != "loaded":
            return False
        model.drains_for = "a request"
        gone = model.gone
        self._changed.set()
        await gone.wait()
        return True

    @property
    def reserved_bytes(self) -> int:
        """The bytes that count for all processes together."""
        return sum(model.reserved_bytes for model in self.models.values())

    # --- loading

    def _is_usable(self, model: PooledModel) -> bool:
        """Return whether a model takes requests now: not if its file was changed, or if its process
        ends.
        """
        if model.is_ready:
            self._check_file(model)
        return model.is_ready and model.process is not None and not model.process.is_lost

    async def _wait_until_loaded(self, model: PooledModel) -> None:
        """Start to load a model if this has not happened, and wait for it. Raises ApiError."""
        if self._is_stopping:
            raise ApiError("the server is stopping", 503)
        if model.load_task is None or model.load_task.done():
            self._raise_failure(model)
            model.load_task = asyncio.create_task(self._load(model))
            model.load_task.add_done_callback(_read_exception)
        with suppress(_LoadAbandoned):
            # One client that leaves must not end the load of the others.
            await asyncio.shield(model.load_task)

    def _raise_failure(self, model: PooledModel) -> None:
        """Raise ApiError if a model has failed, and is not tried again soon."""
        seconds = model.retry_at - time.monotonic()
        if model.error and seconds > MAX_RETRY_WAIT_SECONDS:
            raise ApiError(
                f"{model.name} is not available: {model.error}; it is tried again in"
                f" {math.ceil(seconds)} s",
                503,
                code="model_unavailable",
                hint=model.error_hint,
            )

    async def _load_pinned(self, model: PooledModel) -> None:
        """Load a model at the start of the server. An error was noted when it happened."""
        with suppress(ApiError):
            async with self.use(model, math.inf):
                pass

    async def _load(self, model: PooledModel) -> None:
        """Load a model when it is its turn. Raises ApiError, and _LoadAbandoned."""
        if model.state == "here":
            model.state = "queued"
        try:
            await asyncio.sleep(max(0.0, model.retry_at - time.monotonic()))
            async with self._turn:
                if model.state in ("loaded", "unloading"):
                    if self._is_usable(model):
                        self._grant(model)
                        return
                    self._changed.set()
                    await model.gone.wait()
                    model.state = "queued"
                await self._try_to_open(model)
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

    async def _try_to_open(self, model: PooledModel) -> None:
        """Load a model, and again if its process is killed meanwhile. Raises UserError and
        _LoadAbandoned.
        """
        for delay in RETRY_DELAYS_SECONDS[: MAX_LOAD_TRIES - 1]:
            try:
                await self._plan_and_open(model)
                return
            except ProcessEnded as error:
                self._note(f"{model.name} was lost while it was loaded: {error}")
                model.n_crashes += 1
                await self._discard(model)
                model.state = "queued"
                await asyncio.sleep(delay)
        await self._plan_and_open(model)

    async def _plan_and_open(self, model: PooledModel) -> None:
        """Plan a model, make room for it, and load it. Raises UserError and _LoadAbandoned."""
        started = time.perf_counter()
        stamp = model.served.stamp
        if stamp is None:
            raise UserError(
                f"{model.name} is not on this disk",
                hint=f"llmcli pull {model.served.request.ref}",
            )
        if (model.stamp, model.planned_request) != (stamp, model.served.request):
            model.memory, model.stamp = None, stamp
            model.planned_request = model.served.request
        if model.memory is None:
            await self._make_room(model, PLANNING_BYTES)
            await self._plan(model)
            if not self._has_room(model):
                await self._discard(model)  # its process takes memory that others may need
                model.state = "queued"
        assert model.memory is not None
        await self._make_room(model, self._bytes_to_reserve(model))
        if model.process is None:
            await self._plan(model)
            await self._make_room(model, self._bytes_to_reserve(model))
        assert model.process is not None
        model.state = "loading"
        await asyncio.to_thread(model.process.load, model.reserved_bytes)
        process, model.gone = model.process, asyncio.Event()
        self._spawn(self._watch_process(model, process))
        await process.wait_until_available()
        if model.process is not process:
            raise ProcessEnded("its process ended as soon as it was loaded")
        model.state, model.error, model.drains_for = "loaded", "", ""
        model.last_used = time.monotonic()
        model.expires_at = model.last_used + self._keep_alive(model, None)
        model.n_loads += 1
        model.load_seconds = time.perf_counter() - started
        self._grant(model)
        self._note(
            f"{model.name} is loaded: {format_size(model.reserved_bytes)} of"
            f" {format_size(self.settings.limit_bytes)}"
        )
        self._changed.set()

    async def _plan(self, model: PooledModel) -> None:
        """Start the process of a model, which plans its memory. Raises UserError."""
        model.state = "loading"
        model.process = self._make_process(model.served.request)
        free = self.settings.limit_bytes - self._pinned_bytes(model)
        model.memory = await asyncio.to_thread(model.process.plan, free)

    def _pinned_bytes(self, model: PooledModel) -> int:
        """Return the bytes of the pinned models besides `model`."""
        return sum(
            other.reserved_bytes
            for other in self.models.values()
            if other is not model and other.served.is_pinned
        )

    def _bytes_to_reserve(self, model: PooledModel) -> int:
        """Return the bytes that count for a planned model: what it needs, and room for states of
        answers if the limit has any.
        """
        assert model.memory is not None
        needed, limit = model.memory.needed_bytes, self.settings.limit_bytes
        states = min(model.memory.states, limit // MAX_STATES_SHARE)
        return needed + max(0, min(states, limit - self._pinned_bytes(model) - needed))

    def _residents(self, model: PooledModel) -> list[Resident]:
        """Return the other models that take memory."""
        return [
            Resident(
                other.name,
                other.reserved_bytes,
                # one that ends already is the best choice
                -math.inf if other.state == "unloading" else other.last_used,
                is_busy=other.n_running > 0 and other.state == "loaded",
                is_pinned=other.served.is_pinned,
            )
            for other in self.models.values()
            if other is not model and other.reserved_bytes
        ]

    def _has_room(self, model: PooledModel) -> bool:
        """Return whether a planned model fits beside the models that are busy now."""
        unloads = choose_unloads(
            self._residents(model), self._bytes_to_reserve(model), self.settings.limit_bytes
        )
        return unloads is not None and not any(resident.is_busy for resident in unloads)

    async def _make_room(self, model: PooledModel, nbytes: int) -> None:
        """Unload models until one more of `nbytes` fits, and reserve them. Raises UserError if they
        never fit, and _LoadAbandoned if its clients leave meanwhile.
        """
        try:
            while unloads := self._choose_unloads(model, nbytes):
                self._drain_for_room(model, unloads)
                if not model.n_waiting and not model.served.is_pinned:
                    raise _LoadAbandoned
                self._changed.set()  # idle ones are unloaded by _watch_models
                await self._next_change()
        finally:
            self._drain_for_room(model, ())
        model.reserved_bytes = nbytes

    def _choose_unloads(self, model: PooledModel, nbytes: int) -> set[str]:
        """Return the names of the models to unload so that one more of `nbytes` fits. Raises
        UserError if it never fits.
        """
        unloads = choose_unloads(self._residents(model), nbytes, self.settings.limit_bytes)
        if unloads is None:
            raise self._too_large(model, nbytes)
        return {resident.name for resident in unloads}

    def _drain_for_room(self, model: PooledModel, names: Collection[str]) -> None:
        """Let the loaded models `names` end when they are idle, to make room for `model`, and let
        the others that drained for it answer again.
        """
        for other in self.models.values():
            if other.state != "loaded":
                continue
            if other.name in names:
                other.drains_for = other.drains_for or f"{ROOM_REASON}{model.name}"
            elif other.drains_for.startswith(ROOM_REASON):
                other.drains_for = ""
                if self._is_usable(other):
                    self._grant(other)

    def _too_large(self, model: PooledModel, nbytes: int) -> UserError:
        """Return the error for a model that does not fit beside the pinned ones."""
        pinned, limit = self._pinned_bytes(model), self.settings.limit_bytes
        beside = f", of which pinned models take {format_size(pinned)}" if pinned else ""
        return UserError(
            f"{model.name} needs {format_size(nbytes)}, and all models together may take"
            f" {format_size(limit)}{beside}",
            hint=f"--memory-limit {math.ceil((nbytes + pinned) / 1e6)}M, or a smaller ctx_size in"
            f' [serve."{model.name}"]',
        )

    def _record_failure(self, model: PooledModel, message: str, hint: str) -> None:
        """Note an error of a model, and when to try again."""
        model.n_failures += 1
        delays = RETRY_DELAYS_SECONDS
        delay = delays[min(model.n_failures, len(delays) - 1)]
        model.retry_at = time.monotonic() + delay
        if message != model.error:
            self._note(f"{model.name}: {message}" + (f" ({hint})" if hint else ""))
        model.error, model.error_hint = message, hint

    async def _discard(self, model: PooledModel) -> None:
        """End the process of a model that is not loaded."""
        if model.process is not None:
            model.process.abort()
            await model.process.close()
        model.process, model.reserved_bytes = None, 0
        model.state = "here"
        self._changed.set()

    # --- watching

    async def _watch_process(self, model: PooledModel, process: AdmittedProcess) -> None:
        """Wait until the process of a loaded model has ended, expected or not."""
        reason = await process.serve()
        is_crash = model.state == "loaded"
        await process.close()
        model.process, model.reserved_bytes, model.state, model.drains_for = None, 0, "here", ""
        model.gone.set()
        if is_crash and not self._is_stopping:
            model.n_crashes += 1
            model.n_failures += 1
            delays = RETRY_DELAYS_SECONDS
            model.retry_at = time.monotonic() + delays[min(model.n_failures - 1, len(delays) - 1)]
            model.error, model.error_hint = reason, ""
            self._note(f"{model.name} was lost: {reason}")
        self._changed.set()

    async def _watch_models(self) -> None:
        """Unload idle models that are to make room, or whose time is over, and look at the
        files.
        """
        while True:
            now = time.monotonic()
            for model in tuple(self.models.values()):
                if model.state != "loaded":
                    continue
                self._check_file(model)
                is_over = now >= model.expires_at and not model.served.is_pinned
                if not model.n_running and (model.drains_for or (is_over and not model.n_waiting)):
                    self._begin_unload(model)
            expiries = [
                model.expires_at - now
                for model in self.models.values()
                if model.is_ready and not model.n_running and not model.served.is_pinned
            ]
            with suppress(TimeoutError):
                async with asyncio.timeout(max(MIN_CHECK_SECONDS, min((CHECK_SECONDS, *expiries)))):
                    await self._next_change()

    def _begin_unload(self, model: PooledModel) -> None:
        """Start to end the process of an idle model; _watch_process notices when it has ended."""
        assert model.process is not None
        why = f" for {model.drains_for}" if model.drains_for else ""
        self._note(
            f"{model.name} is unloaded{why}".replace(f"for {ROOM_REASON}", f"to make {ROOM_REASON}")
        )
        model.state = "unloading"
        self._spawn(model.process.close())

    def _check_file(self, model: PooledModel) -> None:
        """Let a loaded model end when it is idle if its file is gone or was replaced."""
        if model.drains_for or model.state != "loaded":
            return
        stamp = model.served.stamp
        if stamp != model.stamp:
            what = "removed" if stamp is None else "replaced"
            self._note(f"the file of {model.name} was {what}: its process ends when it is idle")
            model.drains_for = f"a file that was {what}"

    def _drain_missing(self, model: PooledModel) -> None:
        """Let a model that is no longer offered end when it is idle."""
        if model.state == "loaded" and not model.drains_for:
            self._note(f"{model.name} is no longer offered: its process ends when it is idle")
            model.drains_for = "a removed name"

    def _offered(self) -> Mapping[str, ServedModel]:
        """Return the models that can be named."""
        return {name: model.served for name, model in self.models.items() if model.is_offered}

    def _keep_alive(self, model: PooledModel, requested: float | None) -> float:
        """Return for how many seconds a model stays loaded after a request that asks for
        `requested`.
        """
        if requested is not None:
            return requested
        own = model.served.keep_alive
        return self.settings.keep_alive if own is None else own

    async def _next_change(self) -> None:
        """Wait until something has happened to a model."""
        self._changed.clear()
        await self._changed.wait()

    def _spawn(self, work: Any) -> None:
        """Run a coroutine as a task of the pool."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _read_exception(task: "asyncio.Task[None]") -> None:
    """Mark the error of a load as read, because all clients that waited may have left."""
    if not task.cancelled():
        task.exception()
