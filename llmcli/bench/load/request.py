"""LoadRequest: what was asked for."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import get_args

from llmcli.bench.load import generator, slo
from llmcli.bench.load.generator import Length, Load
from llmcli.bench.load.mixes import Shape
from llmcli.bench.load.session import Asked
from llmcli.bench.load.slo import Slo
from llmcli.errors import UsageError

DEFAULT_USERS, DEFAULT_PERCENT = "8", 95.0


MAX_LOAD_KINDS = ("concurrency", "rate", "both")


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """The options of `bench load`, by the names of its parameters."""

    serve: str
    concurrency: list[str] | None
    rate: list[str] | None
    arrivals: str | None
    burstiness: float | None
    find_max: str | None
    slo: str | None
    percent: float | None
    requests: int | None
    seconds: float | None
    warmup: int | None
    repetitions: int | None
    mix: str
    n_prompt: int
    n_gen: int
    shared: float
    cancel: float
    endpoint: str
    model: str
    api_key: str | None
    api_key_file: Path | None
    cacert: Path | None
    insecure: bool
    timeout: float
    body: str
    seed: int
    no_history: bool
    offline: bool

    @property
    def load_length(self) -> Length:
        """How long each load is measured."""
        wanted = self.requests or (None if self.seconds else Length().requests)
        return Length(wanted, self.seconds, self.warmup)

    @property
    def open_loop(self) -> Load:
        """An open loop without a set rate. Raises UsageError."""
        word = self.arrivals or "poisson"
        if word not in generator.ARRIVALS:
            raise UsageError(
                f"--arrivals {word!r} is unknown",
                hint=f"--arrivals takes: {' '.join(generator.ARRIVALS)}",
            )
        arrivals: generator.Arrivals = next(
            one for one in get_args(generator.Arrivals) if one == word
        )
        plain = Load(arrivals, 1.0)
        return plain if self.burstiness is None else replace(plain, burstiness=self.burstiness)

    @property
    def prompts(self) -> Asked:
        """The prompts that are sent."""
        return Asked(
            self.mix, Shape(self.n_prompt, self.n_gen, self.shared, self.cancel), self.seed
        )

    @property
    def limits(self) -> Slo | None:
        """The limits of --slo. Raises UserError."""
        return slo.parse(self.slo) if self.slo else None


FIELD_NAMES = {field.name for field in fields(LoadRequest)}
