"""A pool of models whose processes load nothing."""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmcli.errors import UserError
from llmcli.model_loader.earlier_load import EarlierLoad
from llmcli.model_loader.planned_memory import PlannedMemory
from llmcli.model_loader.run_flags import RunFlags
from llmcli.runtime.drafting.gain.pass_cost import MeasuredPasses
from llmcli.runtime.requests.beam_settings import NO_SEARCH
from llmcli.runtime.requests.request import RunOptions
from llmcli.serve.processes.front import UpstreamLost
from llmcli.serve.processes.model_process import ProcessEnded
from llmcli.serve.processes.models.model_pool import ModelPool
from llmcli.serve.processes.models.pool_state import PoolSettings
from llmcli.serve.processes.models.served_models import ServedModel
from llmcli.serve.serve_request import ServeRequest

MIB = 1 << 20
HEADERS = [(b"content-type", b"application/json")]


class FakeProcess:
    """A process of AdmittedProcess' form. `needs`: bytes by the name of the model."""

    def __init__(self, world: "World", request: ServeRequest) -> None:
        self.world, self.name = world, request.ref
        self.ended = asyncio.Event()
        self.may_answer = world.may_answer
        self.is_loaded = self.was_aborted = False
        self.pid = 4321
        self.limit_bytes = 0
        self.reason = ""

    def plan(self, limits: Mapping[str, int]) -> PlannedMemory:
        if error := self.world.plan_errors.get(self.name):
            raise UserError(error, hint="try this")
        self.world.plans.append((self.name, dict(limits)))
        on_gpus = self.world.gpu_needs.get(self.name, {})
        needed = self.world.needs[self.name]
        return PlannedMemory(512, needed, 0, 0, 0, 0, on_gpus, self.world.gpus)

    def start(self, limits: Mapping[str, int], earlier: EarlierLoad) -> None:
        self.world.starts.append((self.name, earlier))

    @property
    def measured_passes(self) -> MeasuredPasses:
        return MeasuredPasses({1: 1.0}, len(self.world.loads))

    def load(self, limit_bytes: int) -> None:
        if self.world.n_killed_loads:
            self.world.n_killed_loads -= 1
            raise ProcessEnded("the model's process ended with SIGKILL")
        self.is_loaded, self.limit_bytes = True, limit_bytes
        self.world.loaded.append(self)
        self.world.loads.append(self.name)

    @property
    def is_lost(self) -> bool:
        return self.ended.is_set()

    async def wait_until_available(self) -> None:
        pass

    async def serve(self) -> str:
        await self.ended.wait()
        self._leave()
        return self.reason

    async def ask(
        self, scope: dict[str, Any], body: bytes, key: bytes
    ) -> AsyncGenerator[Any, None]:
        self.world.n_open += 1
        try:
            async for message in self._answer(scope, body):
                yield message
        finally:
            self.world.n_open -= 1

    async def _answer(self, scope: dict[str, Any], body: bytes) -> AsyncGenerator[Any, None]:
        status, content = self.world.answer(self.name, scope, body)
        yield {"type": "http.response.start", "status": status, "headers": HEADERS}
        answered = asyncio.ensure_future(self.may_answer.wait())
        ended = asyncio.ensure_future(self.ended.wait())
        await asyncio.wait((answered, ended), return_when=asyncio.FIRST_COMPLETED)
        answered.cancel()
        ended.cancel()
        if self.ended.is_set():
            raise UpstreamLost(self.reason)
        yield {"type": "http.response.body", "body": content, "more_body": False}

    def crash(self, reason: str = "its process ended (SIGKILL)") -> None:
        self.reason = reason
        self.ended.set()

    def abort(self) -> None:
        self.was_aborted = True
        self.ended.set()

    def stop(self) -> None:
        self.ended.set()

    async def close(self) -> None:
        self.ended.set()
        self._leave()

    def _leave(self) -> None:
        if self in self.world.loaded:
            self.world.loaded.remove(self)


class World:
    """The models on a disk, and the processes of a pool."""

    def __init__(self, folder: Path, needs: dict[str, int], **settings: Any) -> None:
        self.needs = needs
        self.loaded: list[FakeProcess] = []
        self.loads: list[str] = []
        self.plans: list[tuple[str, dict[str, int]]] = []  # with the limits of each
        self.starts: list[tuple[str, EarlierLoad]] = []  # without a plan
        self.gpus: dict[str, int] = {}  # free bytes by GPU
        self.gpu_needs: dict[str, dict[str, int]] = {}  # by model and GPU
        self.plan_errors: dict[str, str] = {}
        self.n_killed_loads = 0  # loads whose process will be killed meanwhile
        self.notes: list[str] = []
        self.n_open = 0  # requests that processes answer
        # returns the status and the body of an answer: of the model, to a scope and a body
        self.answer: Callable[[str, Any, bytes], tuple[int, bytes]] = lambda name, _scope, _body: (
            200,
            name.encode(),
        )
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.files = {name: folder / f"{name}.gguf" for name in needs}
        for path in self.files.values():
            path.write_bytes(b"model")
        self.changes: dict[str, dict[str, Any]] = {}
        self.pool = ModelPool(
            self.find_models,
            lambda request: FakeProcess(self, request),  # type: ignore[arg-type, return-value]
            PoolSettings(**{"limit_bytes": 1000 * MIB, "keep_alive": math.inf, **settings}),
            self.notes.append,
        )
        self.pool.start()

    def find_models(self) -> dict[str, ServedModel]:
        flags = RunFlags(RunOptions(), {}, NO_SEARCH)
        return {
            name: replace(
                ServedModel(
                    (name,),
                    path,
                    5,
                    ServeRequest(name, flags, None, None, 1, 1, {}),  # type: ignore[arg-type]
                ),
                **self.changes.get(name, {}),
            )
            for name, path in self.files.items()
            if path.exists()
        }

    async def ask(self, model: str | None, **fields: Any) -> str:
        """Return the text of an answer."""
        messages = [message async for message in self.messages(model, **fields)]
        self.check()
        return b"".join(message.get("body", b"") for message in messages).decode()

    def messages(
        self, model: str | None, path: str = "/v1/completions", **fields: Any
    ) -> AsyncGenerator[Any, None]:
        body = json.dumps({**({"model": model} if model else {}), **fields}).encode()
        scope = {"type": "http", "path": path, "query_string": b""}
        return self.pool.ask(scope, body, b"")

    def state(self, name: str) -> str:
        return self.pool.models[name].shown_state

    def check(self) -> None:
        """The processes never have more than the limit."""
        for device, limit in self.pool.state.limits.items():
            assert self.pool.state.reserved_bytes(device) <= limit
        given = sum(process.limit_bytes for process in self.loaded)
        assert given <= self.pool.settings.limit_bytes

    async def until(self, is_true: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not is_true():
                await asyncio.sleep(0)


def run(
    scenario: Callable[[World], Any], folder: Path, needs: dict[str, int], **settings: Any
) -> World:
    async def main() -> World:
        world = World(folder, needs, **settings)
        try:
            async with asyncio.timeout(60):
                await scenario(world)
        finally:
            await world.pool.close()
        assert world.loaded == []
        return world

    return asyncio.run(main())
