"""One server under test: its name, how long its prompts are, and loads put on it one after the
other.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from llmcli.bench.load import client as clients
from llmcli.bench.load import mixes, request_file
from llmcli.bench.load.client import Client, Server
from llmcli.bench.load.generator import Enough, Length, Load, Run, drive
from llmcli.bench.load.mixes import Fit, Shape
from llmcli.bench.load.records import Job
from llmcli.bench.load.sse import usage
from llmcli.errors import UserError

SETTLE = 0.2  # seconds after a run in which a server sees that its clients have gone


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of a server: a mix by its name, or a file of requests; and its seed."""

    mix: str = "fixed"
    shape: Shape = field(default_factory=Shape)
    seed: int = 1

    @property
    def file(self) -> bool:
        """Whether it is a file."""
        return self.mix not in mixes.mixes()


class Session:
    """A server whose model is known and whose prompts are fitted to tokens. `fit` None: the
    requests are a file's.
    """

    def __init__(self, client: Client, asked: Asked, fit: Fit | None) -> None:
        self.client, self.asked, self.fit = client, asked, fit
        self.told = request_file.read(Path(asked.mix), asked.shape) if fit is None else []

    @property
    def model(self) -> str:
        """The name that is sent."""
        return self.client.server.model

    def jobs(self, number: int) -> Iterator[Job]:
        """Endless jobs, others for each number."""
        asked, seed = self.asked, self.asked.seed * 1_000_003 + number
        if self.fit is None:
            return request_file.replayed(self.told, asked.shape, seed)
        return mixes.jobs(mixes.mixes()[asked.mix], asked.shape, self.fit, seed)

    async def run(
        self,
        load: Load,
        length: Length,
        number: int,
        *,
        enough: Enough = lambda run, answer: False,
        tick: Callable[[], None] = lambda: None,
        may_fail: bool = False,
    ) -> Run:
        """Put a load on the server; `number` chooses its prompts. Raises UserError where every
        request failed, unless it `may_fail`: a server may refuse all of a load that is too much for
        it.
        """
        load = replace(load, seed=self.asked.seed * 1_000_003 + number)
        run = await drive(
            self.client.ask, self.jobs(number), load, length, enough=enough, tick=tick
        )
        await asyncio.sleep(SETTLE)
        measured = run.measured
        if not may_fail and measured and all(one.error for one in measured):
            first = measured[0]
            words = f"{first.error}: {first.says}" if first.says else str(first.error)
            raise UserError(f"every request failed ({words})", hint=_hint(str(first.error)))
        return run


def _hint(error: str) -> str:
    if error == "timeout":
        return "--timeout SECONDS waits longer, -n fewer tokens take less"
    refused = error.startswith("http 4") or error in (
        "no text",
        "bad stream",
        "error in the stream",
    )
    return (
        "--model, --endpoint and --body change what is asked" if refused else "its log may say why"
    )


@asynccontextmanager
async def opened(server: Server, asked: Asked) -> AsyncIterator[Session]:
    """A session with a server that answers. Raises UserError."""
    async with clients.opened(server) as client:
        if not server.model:
            client.server = server = replace(server, model=await _only(client))
        fit = None if asked.file else await _fitted(client, asked)
        yield Session(client, asked, fit)


async def _only(client: Client) -> str:
    names = await client.models()
    if not names:
        raise UserError(f"{client.server.base} names no model", hint="--model NAME")
    return names[0]


async def _fitted(client: Client, asked: Asked) -> Fit:
    """Ask the server how many tokens two prompts are."""
    mix, rng, counts = mixes.mixes()[asked.mix], Random(f"probe {asked.seed}"), []
    for units in mix.probes:
        told = usage(await client.once(Job(mix.text(units, rng), 1)))
        counts.append(told.prompt if told else None)
    return mixes.fitted(mix, *counts)
