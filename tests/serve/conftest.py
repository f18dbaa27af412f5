"""A server of our own on a free loopback port, in a thread of the test's process."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from llmcli.runtime.request import RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import defaults
from llmcli.serve import server
from llmcli.serve.bridge import Bridge
from llmcli.serve.settings import Settings
from tests.fakes import fake_runner

GREEDY = defaults().with_values({"temp": 0})
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True)
class Served:
    """Where it is, and what it is made of."""

    url: str
    bridge: Bridge
    settings: Settings
    server: server.Server
    thread: threading.Thread  # in which it runs

    @property
    def v1(self) -> str:
        """What OpenAI's clients call the base URL."""
        return f"{self.url}/v1"


@contextmanager
def serving(
    runner: Runner, parallel: int = 4, waiting: int = 64, **settings: Any
) -> Iterator[Served]:
    """Serve a runner until the block ends; then the ledger is whole and nobody holds a cell of it."""
    made = Settings(**{"names": ("tiny",), "sampling": GREEDY, **settings})
    ready = threading.Event()
    with ExitStack() as stack:
        socket = stack.enter_context(server.bound("127.0.0.1", 0))
        made = replace(made, port=socket.getsockname()[1])
        bridge = stack.enter_context(closing(Bridge(runner, parallel, waiting)))
        running = server.Server(bridge, made, ready.set)
        thread = threading.Thread(target=running.run, args=([socket],))
        thread.start()
        try:
            assert ready.wait(30)
            yield Served(server.address(made), bridge, made, running, thread)
        finally:
            running.should_exit = True
            thread.join(30)
            assert not thread.is_alive()
    runner.engine.ledger.check()


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Serve a fake model: its reply, and settings of the server and of the fake context by name."""
    with ExitStack() as stack:

        def start(
            reply: Any = b"hello",
            *,
            parallel: int = 4,
            waiting: int = 64,
            template: str | None = CHAT,
            context: Any = None,
            n_ctx: int = 512,
            n_seq_max: int = 6,
            **settings: Any,
        ) -> Served:
            sizes = {} if context else {"n_ctx": n_ctx, "n_seq_max": n_seq_max}
            runner = fake_runner(reply, template=template, context=context, **sizes)
            return stack.enter_context(serving(runner, parallel, waiting, **settings))

        yield start


@pytest.fixture(scope="session")
def stories_runner(stories_gguf: Path) -> Iterator[Runner]:
    """stories260K, a real model of 1 MB, opened for eight sequences."""
    options = RunOptions(ctx_size=512, threads=1, threads_batch=1)
    with open_runner(stories_gguf, options, template=CHAT, slots=8, gpu_layers=0) as runner:
        yield runner


@pytest.fixture
def tiny(stories_runner: Runner) -> Iterator[Served]:
    """It, served."""
    with serving(stories_runner) as served:
        yield served
