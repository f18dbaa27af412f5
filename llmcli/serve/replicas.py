"""Several models that answer together, through Ray Serve: on one machine, or on a cluster.

Each replica is the application over a model of its own (relay.py has the same over a socket). Ray
Serve starts them, looks after them and starts others; its proxy is not used, our front is what
clients see. Which one answers is PrefixRouter's: the one whose cache has the beginning of the
prompt, as long as it has room.
"""

import asyncio
import logging
import re
import warnings
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.types import Message

from llmcli.errors import UserError
from llmcli.hardware.cluster import gone
from llmcli.serve.affinity import ranked
from llmcli.serve.app import make_app
from llmcli.serve.front import Lost
from llmcli.serve.problems import Problem
from llmcli.serve.relay import Open
from llmcli.serve.sums import SUMMED, together

NAME = "llmcli"
STUCK = 120.0  # seconds in which the engine's thread must come from one step to the next
LOOK = 2.0  # seconds between two looks at a replica
BUSY = 2  # requests of a replica for each that it computes at once: beyond it another one is asked
STARTS = 3  # tries of a replica to open its model
OBJECTS = 80 << 20  # bytes of Ray's object store where we start Ray: requests and answers are small


@dataclass(frozen=True, slots=True)
class Crew:
    """How many, where (a Ray address; None: here), answers at once of each, and requests that may
    wait beside them.
    """

    replicas: int
    address: str | None
    parallel: int
    waiting: int
    cpus: float = 1.0


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray is an extra
    """The replica of the prompt's beginning first; where it is full, of the others the one with the
    least to do.

    Full is `max_ongoing_requests`; the queue lengths are Ray's to know.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas, as Ray asks for them."""
        key = pending_request.kwargs.get("key") if pending_request else None
        if not key:
            return [candidate_replicas]
        names = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        first, *others = (names[name] for name in ranked(key, names))
        return [[first], others]


class Replica:
    """What Ray Serve runs: one open model and its application."""

    def __init__(self, open_model: Open) -> None:
        self._held = ExitStack()
        self._bridge, settings = self._held.enter_context(open_model())
        self._app: Any = make_app(self._bridge, settings)
        self._facts = {"names": settings.names, "n_ctx": self._bridge.runner.n_ctx}

    async def facts(self) -> dict[str, Any]:
        """What the front has to know."""
        return self._facts

    async def ask(
        self, scope: dict[str, Any], body: bytes, key: bytes = b""
    ) -> AsyncGenerator[Message, None]:
        """The application's messages for one request; `key` is the router's."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()
        parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if parts:
                return parts.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            messages.put_nowait(message)

        work = asyncio.create_task(self._app(scope, receive, send))
        work.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
        finally:
            gone.set()
            with suppress(asyncio.CancelledError):
                await work

    async def tell(self, scope: dict[str, Any], body: bytes) -> tuple[str, list[Message]]:
        """This replica's name and its whole answer to what is asked of all of them."""
        messages = [message async for message in self.ask(scope, body)]
        return serve.get_replica_context().replica_id.unique_id, messages

    async def check_health(self) -> None:
        """Raises where the engine's thread no longer gets from step to step; Ray starts another
        replica then.
        """
        await asyncio.wait_for(self._bridge.call(lambda: None), STUCK)

    def __del__(self) -> None:
        """Ray's way to end a replica."""
        if hasattr(self, "_held"):
            self._held.close()


class Replicas:
    """The front's upstream over a handle of Ray Serve."""

    def __init__(self, handle: Any) -> None:
        self._asking, self._handle = handle.options(method_name="ask", stream=True), handle
        self._under_way: set[Any] = set()

    def facts(self) -> dict[str, Any]:
        """What one of them tells of itself."""
        found: dict[str, Any] = self._handle.facts.remote().result(timeout_s=STUCK)
        return found

    async def ask(
        self, scope: dict[str, Any], body: bytes, key: bytes
    ) -> AsyncGenerator[Message, None]:
        """Upstream's; what is told of all together is asked of all."""
        if scope["path"] in SUMMED and scope["method"] == "GET":
            for message in await self._of_all(scope, body):
                yield message
            return
        response = self._asking.remote(scope, body, key=key)
        self._under_way.add(response)
        try:
            async for message in response:
                yield message
        except BackPressureError:
            raise Problem("as many requests wait as may wait", 429, code="busy") from None
        except (RayError, RayServeException) as error:
            raise Lost(str(error)) from None
        finally:
            self._under_way.discard(response)
            response.cancel()

    async def _of_all(self, scope: dict[str, Any], body: bytes) -> list[Message]:
        """One answer of all; the first that is none (a key is missing) as it is."""

        def told() -> list[tuple[str, list[Message]]]:
            response: Any = self._handle.broadcast("tell", scope, body)
            return list(response.results(timeout_s=STUCK))

        try:
            answers = dict(await asyncio.to_thread(told))
        except (RayError, RayServeException, TimeoutError) as error:
            raise Lost(str(error)) from None
        if not answers:
            raise Lost
        for messages in answers.values():
            if messages[0]["status"] != 200:
                return messages
        bodies = {
            name: b"".join(one.get("body", b"") for one in messages)
            for name, messages in answers.items()
        }
        raw, start = together(scope["path"], bodies), next(iter(answers.values()))[0]
        headers = [
            (name, value) for name, value in start["headers"] if name.lower() != b"content-length"
        ]
        headers.append((b"content-length", str(len(raw)).encode()))
        return [
            {**start, "headers": headers},
            {"type": "http.response.body", "body": raw, "more_body": False},
        ]

    async def wait(self, seconds: float) -> str:
        """Upstream's: Ray waits for a replica itself."""
        return ""

    def stop(self) -> None:
        """End every answer now."""
        for response in tuple(self._under_way):
            response.cancel()


@contextmanager
def running(open_model: Open, crew: Crew) -> Iterator[Replicas]:
    """Replicas until the block ends; raises UserError where Ray or a model does not start."""
    with cluster(crew.address, max(1.0, crew.replicas * crew.cpus)):
        serve.start(
            proxy_location="Disabled",
            logging_config={"log_level": "ERROR", "enable_access_log": False},
        )
        made = serve.deployment(
            Replica,
            name=NAME,
            num_replicas=crew.replicas,
            max_ongoing_requests=BUSY * crew.parallel,
            max_queued_requests=crew.waiting,
            ray_actor_options={"num_cpus": crew.cpus},
            request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
            health_check_period_s=LOOK,
            health_check_timeout_s=STUCK + LOOK,
            max_constructor_retry_count=STARTS,
            graceful_shutdown_timeout_s=LOOK,
        )
        try:
            try:
                handle = serve.run(made.bind(open_model), name=NAME, route_prefix=None)
            except RuntimeError as error:  # with the replica's own words in it
                told = re.findall(r"(?:UserError|Refusal|Damaged): (.+)", str(error))
                raise UserError(
                    f"the replicas did not start: {told[-1] if told else error}",
                    hint="a cluster's machines need llmcli, Ray and the model under the same names as this one",
                ) from None
            yield Replicas(handle)
        finally:
            if crew.address:  # ours ends as a whole
                serve.delete(NAME)


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a Ray cluster has: machines that are there, their CPUs, bytes of memory for tasks, and
    Ray's version.
    """

    machines: int
    cpus: float
    memory: int
    version: str


def look(address: str) -> Cluster:
    """Ask a cluster; raises UserError where there is none."""
    with cluster(address, 0) as machines:
        found = ray.cluster_resources()
        return Cluster(
            machines, found.get("CPU", 0.0), int(found.get("memory", 0)), ray.__version__
        )


@contextmanager
def cluster(address: str | None, cpus: float) -> Iterator[int]:
    """Ray: a cluster's, or our own on this machine with so many CPUs to give away; how many
    machines that are.
    """
    if address and ":" in address and gone([address]):  # Ray itself asks for minutes
        raise UserError(
            f"no Ray at {address}: nobody listens there",
            hint="ray status on a machine of the cluster",
        )
    for name in ("ray", "ray.serve", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"ray\.")  # advice to whoever writes for Ray
    quiet: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "include_dashboard": False,
    }
    try:
        if address:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        else:
            ray.init(num_cpus=-(-cpus // 1), object_store_memory=OBJECTS, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = address or "this machine"
        raise UserError(
            f"Ray does not start at {where}: {error}", hint="ray status tells about a cluster"
        ) from None
    try:
        yield sum(node["Alive"] for node in ray.nodes())
    finally:
        ray.shutdown()
