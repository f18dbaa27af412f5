"""A session with one server under test: its model, the length of its prompts in tokens, and its
loads.
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

SETTLE = 0.2  # seconds after a run in which the server notices that its clients disconnected


@dataclass(frozen=True, slots=True)
class Asked:
    """The source of prompts: a mix by its name, or a file with requests; and the seed."""

    mix: str = "fixed"
    shape: Shape = field(default_factory=Shape)
    seed: int = 1

    @property
    def file(self) -> bool:
        """Whether the mix is a file."""
        return self.mix not in mixes.mixes()


class Session:
    """A server whose model is known and whose prompt lengths are calibrated in tokens.
    `unit_tokens` None: the requests come from a file.
    """

    def __init__(self, client: Client, asked: Asked, fit: Fit | None) -> None:
        self.client, self.asked, self.fit = client, asked, fit
        self.told = request_file.read(Path(asked.mix), asked.shape) if fit is None else []

    @property
    def model(self) -> str:
        """The model name sent in requests."""
        return self.client.server.model

    def jobs(self, number: int) -> Iterator[Job]:
        """Yield jobs endlessly, with different prompts for each number."""
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
        """Apply a load to the server. `number` selects its prompts.

        Raises UserError if every request failed, unless `may_fail`: a server may refuse all
        requests of an excessive load.
        """
        load = replace(load, seed=self.asked.seed * 1_000_003 + number)
        run = await drive(
            self.client.ask, self.jobs(number), load, length, enough=enough, tick=tick
        )
        await asyncio.sleep(SETTLE)
        measured = run.measured
        if not may_fail and measured and all(answer.error for answer in measured):
            first = measured[0]
            message = f"{first.error}: {first.says}" if first.says else str(first.error)
            raise UserError(f"every request failed ({message})", hint=_hint(str(first.error)))
        return run


def _hint(error: str) -> str:
    if error == "timeout":
        return "--timeout SECONDS waits longer, a smaller -n takes less time"
    refused = error.startswith("http 4") or error in (
        "no text",
        "bad stream",
        "error in the stream",
    )
    return (
        "--model, --endpoint and --body change the request" if refused else "check the server's log"
    )


@asynccontextmanager
async def opened(server: Server, asked: Asked) -> AsyncIterator[Session]:
    """Open a session with a server. Raises UserError if it does not answer."""
    async with clients.opened(server) as client:
        if not server.model:
            client.server = server = replace(server, model=await _only(client))
        fit = None if asked.file else await _fitted(client, asked)
        yield Session(client, asked, fit)


async def _only(client: Client) -> str:
    names = await client.models()
    if not names:
        raise UserError(f"{client.server.base} lists no model", hint="--model NAME")
    return names[0]


async def _fitted(client: Client, asked: Asked) -> Fit:
    """Ask the server for the token counts of two prompts."""
    mix, rng, counts = mixes.mixes()[asked.mix], Random(f"probe {asked.seed}"), []
    for units in mix.probes:
        token_usage = usage(await client.once(Job(mix.text(units, rng), 1)))
        counts.append(token_usage.prompt if token_usage else None)
    return mixes.fitted(mix, *counts)
