"""Runs several copies of the model behind one front server, with Ray Serve, on one machine or a
cluster.

Each replica runs the application with a model (asgi_relay.py does the same over a socket). Ray
Serve starts and restarts the replicas. Ray's HTTP proxy is not used; clients connect to llmcli's
front server. PrefixRouter sends a request to the replica whose cache contains the beginning of its
prompt, unless that replica is full.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.types import Message

from llmcli.api.errors import ApiError
from llmcli.errors import UserError
from llmcli.hardware.ray_cluster import open_cluster
from llmcli.serve.http.app import make_app
from llmcli.serve.http.routes.answer_control import CONTROL_PATHS
from llmcli.serve.processes.asgi_relay import OpenModel
from llmcli.serve.processes.front import UpstreamLost
from llmcli.serve.processes.merged_metrics import MERGED_PATHS, merge_bodies
from llmcli.serve.processes.prefix_affinity import rank_replicas

APPLICATION_NAME = "llmcli"
CALL_TIMEOUT_SECONDS = 120.0  # seconds within which a replica must respond to a call
HEALTH_CHECK_SECONDS = 2.0  # seconds between two health checks of a replica
# A replica accepts this many requests for each answer that it can run at once. Requests after that
# go to other replicas.
REQUESTS_PER_ANSWER = 2
MAX_START_TRIES = 3  # attempts of a replica to open the model


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """How many replicas to run and where.

    `address`: the address of the Ray cluster; None: this machine. `parallel`: the number of answers
    that run at once in each replica. `waiting`: the number of further requests that may wait in
    Ray. `cpus`: the number of CPUs that Ray reserves for each replica.
    """

    n_replicas: int
    address: str | None
    parallel: int
    waiting: int
    cpus: float = 1.0


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray is an extra
    """Chooses the replica whose cache contains the beginning of the prompt, or the least busy of
    the others if that replica is full.

    A replica is full if it is processing `max_ongoing_requests` requests; Ray measures this.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return groups of replicas, the preferred group first, as Ray expects them."""
        key = pending_request.kwargs.get("key") if pending_request else None
        if not key:
            return [candidate_replicas]
        names = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        first, *others = (names[name] for name in rank_replicas(key, names))
        return [[first], others]


class Replica:
    """One replica in Ray Serve: an open model and its application."""

    def __init__(self, open_model: OpenModel) -> None:
        self._stack = ExitStack()
        self._bridge, settings = self._stack.enter_context(open_model())
        self._app: Any = make_app(self._bridge, settings)
        self._facts = {"names": settings.names, "n_ctx": self._bridge.runner.n_ctx}

    async def facts(self) -> dict[str, Any]:
        """Return what the front server needs to know about the model: its names and context
        size.
        """
        return self._facts

    async def ask(
        self, scope: dict[str, Any], body: bytes, key: bytes = b""
    ) -> AsyncGenerator[Message, None]:
        """Run the application for a request, and yield the ASGI messages of the response. `key` is
        only used by PrefixRouter.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        disconnected = asyncio.Event()
        unread_messages: list[Message] = [
            {"type": "http.request", "body": body, "more_body": False}
        ]

        async def receive() -> Message:
            if unread_messages:
                return unread_messages.pop()
            await disconnected.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            messages.put_nowait(message)

        work = asyncio.create_task(self._app(scope, receive, send))
        work.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
        finally:
            disconnected.set()
            with suppress(asyncio.CancelledError):
                await work

    async def answer_whole(self, scope: dict[str, Any], body: bytes) -> tuple[str, list[Message]]:
        """Return this replica's name, and all ASGI messages of its response. It is called on all
        replicas at once, to merge their responses.
        """
        messages = [message async for message in self.ask(scope, body)]
        return serve.get_replica_context().replica_id.unique_id, messages

    async def check_health(self) -> None:
        """Raise an error if the engine's thread has ended or is stuck. Ray then replaces the
        replica.
        """
        self._bridge.check_responsive()

    def __del__(self) -> None:
        """Close the model. Ray ends a replica by deleting this object."""
        if hasattr(self, "_stack"):
            self._stack.close()


class Replicas:
    """All replicas as the front server's Upstream. `handle`: the Ray Serve handle that calls
    them.
    """

    def __init__(self, handle: Any) -> None:
        self._streaming_handle, self._handle = (
            handle.options(method_name="ask", stream=True),
            handle,
        )
        self._running: set[Any] = set()

    def facts(self) -> dict[str, Any]:
        """Return what one of the replicas reports about its model."""
        facts: dict[str, Any] = self._handle.facts.remote().result(timeout_s=CALL_TIMEOUT_SECONDS)
        return facts

    async def ask(
        self, scope: dict[str, Any], body: bytes, key: bytes
    ) -> AsyncGenerator[Message, None]:
        """Send a request to one replica, as Upstream.ask. Requests for MERGED_PATHS are sent to all
        replicas, and so are changes of running answers, each of which one replica has.
        """
        if scope["path"] in MERGED_PATHS and scope["method"] == "GET":
            for message in await self._ask_all(scope, body):
                yield message
            return
        if scope["path"] in CONTROL_PATHS:
            for message in choose_answer(await self._broadcast(scope, body)):
                yield message
            return
        response = self._streaming_handle.remote(scope, body, key=key)
        self._running.add(response)
        try:
            async for message in response:
                yield message
        except BackPressureError:
            raise ApiError("the queue is full", 429, code="busy") from None
        except (RayError, RayServeException) as error:
            raise UpstreamLost(str(error)) from None
        finally:
            self._running.discard(response)
            response.cancel()

    async def _ask_all(self, scope: dict[str, Any], body: bytes) -> list[Message]:
        """Return the ASGI messages of the merged response of all replicas. If a replica responds
        with an error (such as a missing key), return its response instead.
        """
        answers = await self._broadcast(scope, body)
        for messages in answers.values():
            if messages[0]["status"] != 200:
                return messages
        bodies = {
            name: b"".join(message.get("body", b"") for message in messages)
            for name, messages in answers.items()
        }
        raw, start = merge_bodies(scope["path"], bodies), next(iter(answers.values()))[0]
        headers = [
            (name, value) for name, value in start["headers"] if name.lower() != b"content-length"
        ]
        headers.append((b"content-length", str(len(raw)).encode()))
        return [
            {**start, "headers": headers},
            {"type": "http.response.body", "body": raw, "more_body": False},
        ]

    async def _broadcast(self, scope: dict[str, Any], body: bytes) -> dict[str, list[Message]]:
        """Return the ASGI messages of the response of each replica. Raises UpstreamLost."""

        def broadcast() -> list[tuple[str, list[Message]]]:
            """Call all replicas, and return each one's name and response."""
            response: Any = self._handle.broadcast("answer_whole", scope, body)
            return list(response.results(timeout_s=CALL_TIMEOUT_SECONDS))

        try:
            answers = dict(await asyncio.to_thread(broadcast))
        except (RayError, RayServeException, TimeoutError) as error:
            raise UpstreamLost(str(error)) from None
        if not answers:
            raise UpstreamLost
        return answers

    async def wait(self, seconds: float) -> str:
        """Return "" at once, because Ray itself waits for a replica."""
        return ""

    def stop(self) -> None:
        """Cancel every answer now."""
        for response in tuple(self._running):
            response.cancel()


def choose_answer(answers: dict[str, list[Message]]) -> list[Message]:
    """Return the response of the replica that has what a request names, or a response with status
    404 if none has it.
    """
    responses = list(answers.values())
    found = (messages for messages in responses if messages[0]["status"] != 404)
    return next(found, responses[0])


@contextmanager
def open_replicas(open_model: OpenModel, settings: ReplicaSettings) -> Iterator[Replicas]:
    """Start the replicas for the `with` block, and stop them at its end. Raises UserError if Ray or
    a model does not start.
    """
    with open_cluster(settings.address, max(1.0, settings.n_replicas * settings.cpus)):
        serve.start(
            proxy_location="Disabled",
            logging_config={"log_level": "ERROR", "enable_access_log": False},
        )
        deployment = serve.deployment(
            Replica,
            name=APPLICATION_NAME,
            num_replicas=settings.n_replicas,
            max_ongoing_requests=REQUESTS_PER_ANSWER * settings.parallel,
            max_queued_requests=settings.waiting,
            ray_actor_options={"num_cpus": settings.cpus},
            request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
            health_check_period_s=HEALTH_CHECK_SECONDS,
            health_check_timeout_s=CALL_TIMEOUT_SECONDS,
            max_constructor_retry_count=MAX_START_TRIES,
            graceful_shutdown_timeout_s=HEALTH_CHECK_SECONDS,
        )
        try:
            try:
                handle = serve.run(
                    deployment.bind(open_model), name=APPLICATION_NAME, route_prefix=None
                )
            except RuntimeError as error:  # the message contains the replica's error
                reasons = re.findall(
                    r"(?:UserError|DamagedSourceError|DamagedLine): (.+)", str(error)
                )
                raise UserError(
                    f"the replicas did not start: {reasons[-1] if reasons else error}",
                    hint="every machine of the cluster needs llmcli, Ray and the model under the"
                    " same names",
                ) from None
            yield Replicas(handle)
        finally:
            if settings.address:  # without an address, open_cluster shuts Ray down completely
                serve.delete(APPLICATION_NAME)
