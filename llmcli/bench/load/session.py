"""A connection to one server under test. It measures how many tokens the server counts for a
prompt, and applies loads to the server.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random

from llmcli.bench.load import mixes, request_file
from llmcli.bench.load.client import Client, LoadTarget, open_client
from llmcli.bench.load.generator import Load, LoadLength, LoadRun, StopCheck, generate_load
from llmcli.bench.load.mixes import RequestLengths, UnitTokens
from llmcli.bench.load.records import LoadJob
from llmcli.errors import UserError
from llmcli.http_client.openai_stream import read_usage
from llmcli.text_input import expand_path

SETTLE_SECONDS = 0.2  # pause after each run, in which the server notices the closed connections


@dataclass(frozen=True, slots=True)
class PromptShape:
    """The settings of the prompts. `mix`: the name of a mix, or the path of a file with requests.
    `seed`: seed of the random prompts.
    """

    mix: str = "fixed"
    lengths: RequestLengths = field(default_factory=RequestLengths)
    seed: int = 1

    @property
    def is_file(self) -> bool:
        """Whether `mix` is the path of a file."""
        return self.mix not in mixes.load_mixes()


class ServerSession:
    """A server under test and the prompts to send to it. `unit_tokens`: the tokens per unit of a
    generated prompt, as measured on this server; None if the prompts come from a file.
    """

    def __init__(self, client: Client, prompts: PromptShape, fit: UnitTokens | None) -> None:
        self.client, self.prompts, self.unit_tokens = client, prompts, fit
        self.file_jobs = (
            request_file.read_requests(expand_path(prompts.mix), prompts.lengths)
            if fit is None
            else []
        )

    @property
    def model(self) -> str:
        """The model name in each request."""
        return self.client.server.model

    def jobs(self, number: int) -> Iterator[LoadJob]:
        """Yield requests endlessly. Each `number` gives a different sequence of prompts."""
        prompts, seed = self.prompts, self.prompts.seed * 1_000_003 + number
        if self.unit_tokens is None:
            return request_file.replay_requests(self.file_jobs, prompts.lengths, seed)
        return mixes.generate_jobs(
            mixes.load_mixes()[prompts.mix], prompts.lengths, self.unit_tokens, seed
        )

    async def run_load(
        self,
        load: Load,
        length: LoadLength,
        number: int,
        *,
        should_stop: StopCheck = lambda run, answer: False,
        tick: Callable[[], None] = lambda: None,
        may_fail: bool = False,
    ) -> LoadRun:
        """Apply a load to the server, and return the recorded answers. `number` selects the
        sequence of prompts.

        Raises UserError if every request failed. With `may_fail`, do not raise, because a server
        may refuse all requests of a load that is too high.
        """
        load = replace(load, seed=self.prompts.seed * 1_000_003 + number)
        run = await generate_load(
            self.client.send, self.jobs(number), load, length, should_stop=should_stop, tick=tick
        )
        await asyncio.sleep(SETTLE_SECONDS)
        measured = run.measured_answers
        if not may_fail and measured and all(answer.error for answer in measured):
            first = measured[0]
            message = (
                f"{first.error}: {first.error_message}" if first.error_message else str(first.error)
            )
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
async def open_session(server: LoadTarget, prompts: PromptShape) -> AsyncIterator[ServerSession]:
    """Open a session with a server for the block: find the model name, and measure the tokens of
    generated prompts. Raises UserError if the server does not answer.
    """
    async with open_client(server) as client:
        if not server.model:
            client.server = server = replace(server, model=await _first_model(client))
        fit = None if prompts.is_file else await _measure_unit_tokens(client, prompts)
        yield ServerSession(client, prompts, fit)


async def _first_model(client: Client) -> str:
    names = await client.list_models()
    if not names:
        raise UserError(f"{client.server.base_url} lists no model", hint="--model NAME")
    return names[0]


async def _measure_unit_tokens(client: Client, prompts: PromptShape) -> UnitTokens:
    """Measure the tokens per unit of a mix by sending two prompts of different lengths to the
    server.
    """
    mix, rng, counts = mixes.load_mixes()[prompts.mix], Random(f"probe {prompts.seed}"), []
    for units in mix.probe_units:
        token_usage = read_usage(await client.complete(LoadJob(mix.text(units, rng), 1)))
        counts.append(token_usage.prompt if token_usage else None)
    return mixes.fit_units(mix, *counts)
