"""The settings of `bench load`, grouped into classes. Each class checks its command-line values
when it is created.

Modules that measure are imported inside functions, because `--help` reads these classes and must
start fast.
"""

import json
import shlex
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from llmcli.errors import UsageError, UserError
from llmcli.http_client.api_key import read_api_key

if TYPE_CHECKING:
    from llmcli.bench.load.generator import Arrivals, Load, LoadLength
    from llmcli.bench.load.max_load import LoadKind, MaxLoadSettings
    from llmcli.bench.load.session import PromptShape
    from llmcli.bench.load.slo import Slo

DEFAULT_CONCURRENCY = "8"
DEFAULT_PERCENT = 95.0  # percentage of the requests that must meet --slo, unless the user sets it
MAX_CONCURRENCY = 10_000
MAX_RATE = 1e5  # maximum --rate in requests per second
MAX_LOAD_KINDS = ("concurrency", "rate", "both")
ENDPOINTS = ("chat", "completions")


@dataclass(frozen=True)
class LevelSettings:
    """The loads to measure: numbers of parallel requests (`concurrency`, a closed loop) and request
    rates (`rate`, an open loop).

    Raises UserError or UsageError for invalid values.
    """

    concurrency: list[str] | None = None
    rate: list[str] | None = None
    arrivals: str | None = None
    burstiness: float | None = None

    def __post_init__(self) -> None:
        assert self.open_loop and self.loads  # raises for invalid words
        if self.burstiness is not None and self.arrivals != "gamma":
            raise UsageError(
                "--burstiness needs --arrivals gamma",
                hint="add --arrivals gamma, or leave out --burstiness",
            )

    @cached_property
    def open_loop(self) -> "Load":
        """The requested kind of open loop. Its rate is a placeholder."""
        from llmcli.bench.load import generator

        word = self.arrivals or "poisson"
        if word not in generator.ARRIVAL_KINDS:
            raise UsageError(
                f"--arrivals {word!r} is unknown",
                hint=f"--arrivals takes: {' '.join(generator.ARRIVAL_KINDS)}",
            )
        arrivals: Arrivals = next(kind for kind in get_args(generator.Arrivals) if kind == word)
        load = generator.Load(arrivals, 1.0)
        return load if self.burstiness is None else replace(load, burstiness=self.burstiness)

    @cached_property
    def loads(self) -> "tuple[Load, ...]":
        """All loads: those of --concurrency, then those of --rate."""
        from llmcli.bench.load.generator import Load
        from llmcli.bench.speed.parameter_grid import parse_numbers

        texts = self.concurrency or ([] if self.rate else [DEFAULT_CONCURRENCY])
        counts = parse_numbers("--concurrency", texts, 1, MAX_CONCURRENCY) if texts else []
        return (
            *(Load("closed", count) for count in counts),
            *(replace(self.open_loop, level=rate) for rate in self._rates),
        )

    @property
    def _rates(self) -> list[float]:
        rates = []
        for word in ",".join(self.rate).split(",") if self.rate else ():
            try:
                rate = float(word)
            except ValueError:
                rate = 0.0
            if not 0 < rate <= MAX_RATE:
                raise UserError(
                    f"--rate {word!r} is invalid", hint="--rate 0.5,1,2 (requests per second)"
                )
            rates.append(rate)
        return rates


@dataclass(frozen=True)
class SearchSettings:
    """The latency limits (`slo`), and whether to search for the largest load that keeps them
    (`find_max`).

    Raises UserError or UsageError for invalid values.
    """

    find_max: str | None = None
    slo: str | None = None
    percent: float | None = None

    def __post_init__(self) -> None:
        from llmcli.bench.load.slo import SLO_HINT

        limits = self.limits
        if self.find_max is None:
            if self.percent is not None:
                raise UsageError(
                    "--percent needs --find-max",
                    hint="add --find-max both, or leave out --percent",
                )
            return
        if self.find_max not in MAX_LOAD_KINDS:
            raise UsageError(
                f"--find-max {self.find_max!r} is unknown",
                hint=f"--find-max takes: {' '.join(MAX_LOAD_KINDS)}",
            )
        if limits is None:
            raise UsageError("--find-max needs --slo", hint=SLO_HINT)

    @cached_property
    def limits(self) -> "Slo | None":
        """The latency limits of --slo; None without --slo."""
        from llmcli.bench.load.slo import parse_slo

        return parse_slo(self.slo) if self.slo else None

    @property
    def kinds(self) -> "tuple[LoadKind, ...]":
        """The kinds of load whose maximum is searched for; empty without --find-max."""
        match self.find_max:
            case None:
                return ()
            case "both":
                return ("concurrency", "rate")
            case "rate":
                return ("rate",)
            case _:
                return ("concurrency",)

    @property
    def fraction(self) -> float:
        """The fraction of the requests that must be within the limits."""
        return (DEFAULT_PERCENT if self.percent is None else self.percent) / 100


@dataclass(frozen=True)
class LengthSettings:
    """How long and how often each load is measured. None: the default, which differs between loads,
    searches and comparisons of servers.
    """

    requests: int | None = None
    seconds: float | None = None
    warmup: int | None = None
    repetitions: int | None = None

    @property
    def load_length(self) -> "LoadLength":
        """The length of one measurement of a load."""
        from llmcli.bench.load.generator import LoadLength

        requests = self.requests or (None if self.seconds else LoadLength().requests)
        return LoadLength(requests, self.seconds, self.warmup)

    def total_requests(self, n_loads: int, n_runs: int) -> int | None:
        """Return the total number of requests of all measurements; None if the number depends on a
        duration in seconds. `n_runs`: the measurements of each load.
        """
        count = self.load_length.requests
        return None if count is None or self.seconds else count * n_loads * n_runs


@dataclass(frozen=True)
class PromptSettings:
    """The prompts to send: a mix or a file (`mix`), and their lengths in tokens. Raises UsageError
    if --shared is used with a file.
    """

    mix: str = "fixed"
    n_prompt: int = 512
    n_gen: int = 128
    shared: float = 0.0
    cancel: float = 0.0

    def __post_init__(self) -> None:
        if self.shared and not self.is_generated:
            raise UsageError(
                f"--shared applies to generated prompts, not to {self.mix}",
                hint="leave out --shared",
            )

    @property
    def is_generated(self) -> bool:
        """Whether the prompts are generated; otherwise they come from a file."""
        from llmcli.bench.load.mixes import load_mixes

        return self.mix in load_mixes()

    def source(self, seed: int) -> "PromptShape":
        """Return the settings of the prompts together with the seed."""
        from llmcli.bench.load.mixes import RequestLengths
        from llmcli.bench.load.session import PromptShape

        shape = RequestLengths(self.n_prompt, self.n_gen, self.shared, self.cancel)
        return PromptShape(self.mix, shape, seed)


@dataclass(frozen=True)
class EndpointSettings:
    """How requests are sent to the server. Raises UserError or UsageError for invalid values.

    `model`: the model name to send; "": the first model that the server lists. `timeout`: in
    seconds. `body`: additional fields of each request, as a JSON object.
    """

    endpoint: str = "chat"
    model: str = ""
    api_key: str | None = None
    api_key_file: Path | None = None
    cacert: Path | None = None
    insecure: bool = False
    timeout: float = 600.0
    body: str = ""

    def __post_init__(self) -> None:
        if self.endpoint not in ENDPOINTS:
            raise UsageError(
                f"--endpoint {self.endpoint!r} is unknown",
                hint=f"--endpoint takes: {' '.join(ENDPOINTS)}",
            )
        if self.api_key and self.api_key_file:
            raise UsageError("two keys given", hint="leave out --api-key or --api-key-file")
        assert self.extra_fields is not None  # raises for invalid JSON

    @cached_property
    def extra_fields(self) -> dict[str, Any]:
        """The additional fields of each request's body."""
        try:
            fields = json.loads(self.body or "{}")
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            raise UserError(
                f"--body is not a JSON object: {self.body[:80]!r}",
                hint="""--body '{"temperature": 0.7}'""",
            )
        return fields

    def read_key(self) -> str | None:
        """Return the API key of --api-key or of the file of --api-key-file; None without a key.
        Raises UserError if the file cannot be read.
        """
        return read_api_key(self.api_key, self.api_key_file)


@dataclass(frozen=True)
class LoadRequest:
    """All settings of one call of `bench load`.

    `servers`: each is the URL of a running server, or a model for which a server is started. Two
    servers are compared. `serve`: flags for the started servers. Raises UsageError for settings
    that exclude each other.
    """

    servers: tuple[str, ...]
    levels: LevelSettings
    search: SearchSettings
    length: LengthSettings
    prompts: PromptSettings
    target: EndpointSettings
    serve: str = ""
    seed: int = 1
    keep_history: bool = True

    def __post_init__(self) -> None:
        searches_rate = "rate" in self.search.kinds
        if self.serve and all("://" in name for name in self.servers):
            raise UsageError(
                "--serve applies to a server that llmcli starts, but "
                f"{self.servers[0]} is running already",
                hint="leave out --serve",
            )
        assert self.serve_flags is not None  # raises for an unclosed quote
        if self.levels.arrivals and not (self.levels.rate or searches_rate):
            raise UsageError(
                "--arrivals applies to an open loop, and none is measured",
                hint="add --rate 0.5,1,2",
            )
        if not self.search.find_max:
            return
        if len(self.servers) > 1:
            raise UsageError("--find-max works on one server", hint="leave out --against")
        for flag, value in (
            ("--concurrency", self.levels.concurrency),
            ("--rate", self.levels.rate),
        ):
            if value:
                raise UsageError(
                    f"--find-max chooses the loads itself, so {flag} does not apply",
                    hint=f"leave out {flag}",
                )

    @cached_property
    def serve_flags(self) -> list[str]:
        """The text of --serve, split into words. Raises UsageError for an unclosed quote."""
        try:
            return shlex.split(self.serve)
        except ValueError:
            raise UsageError(
                f"--serve has an unclosed quote: {self.serve!r}", hint="--serve '-t 2 -np 8'"
            ) from None

    @property
    def search_rules(self) -> "MaxLoadSettings | None":
        """The settings of the search for the largest load; None without --find-max."""
        from llmcli.bench.load import level_search, max_load

        if self.search.limits is None or not self.search.find_max:
            return None
        loop = self.levels.open_loop
        return max_load.MaxLoadSettings(
            self.search.limits,
            self.search.fraction,
            self.length.requests or max_load.MIN_REQUESTS,
            self.length.seconds,
            self.length.warmup,
            self.length.repetitions or level_search.MAX_MEASUREMENTS,
            loop.arrivals,
            loop.burstiness,
        )
