"""Prompt mixes: each module exports MIXES, ways to write a prompt of a given length.

A mix generates an endless sequence of jobs from a seed. By default no two prompts have the same
beginning, so that a server's prefix cache can reuse only the template; a fraction of every prompt
can be shared on request.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from llmcli.bench.load.records import Job
from quant.registry import collect


class Mix(Protocol):
    """A generator of text in units: words or lines.

    The token counts of two prompts of `probe_units` units give the tokens per unit; `guess` is used
    if the server does not count tokens.
    """

    name: str
    probes: tuple[int, int]
    guess: float

    def text(self, units: int, rng: random.Random) -> str:
        """Return `units` units of random text."""
        ...


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths of prompts and answers in tokens. `shared_fraction` (0 to 1) of each prompt is common
    to all; `cancelled_fraction` of the requests are canceled early.
    """

    prompt: int = 512
    output: int = 128
    shared: float = 0.0
    cancel: float = 0.0


@dataclass(frozen=True, slots=True)
class Fit:
    """Tokens of a prompt as a linear function of its units: `base` for the template, `each` per
    unit.
    """

    base: float
    each: float

    def units(self, tokens: int) -> int:
        """Return the units for a number of tokens, at least one."""
        return max(1, round((tokens - self.base) / self.each))


def mixes() -> dict[str, Mix]:
    """Return all mixes by name."""
    return collect("llmcli.bench.load.mixes", "MIXES")


def jobs(mix: Mix, shape: Shape, fit: Fit, seed: int) -> Iterator[Job]:
    """Yield jobs endlessly; the same ones for the same seed."""
    units = fit.units(shape.prompt)
    common = round(units * shape.shared)
    # The shared part depends only on the mix and its length, so that all seeds of a load share it.
    prefix = mix.text(common, random.Random(f"shared {mix.name} {common}")) if common else ""
    rng = random.Random(f"{seed} {mix.name}")
    while True:
        text = mix.text(max(1, units - common), rng)
        yield Job(text, shape.output, prefix, cancel_after=leaves(shape, shape.output, rng))


def leaves(shape: Shape, output: int, rng: random.Random) -> int | None:
    """Return the chunk after which this request is canceled; None: it is not."""
    return rng.randrange(output) if shape.cancel and rng.random() < shape.cancel else None


def fitted(mix: Mix, few: int | None, many: int | None) -> Fit:
    """Return the line through the token counts of two prompts of `probe_units` units, or the mix's
    guess if there are no counts.
    """
    if few is None or many is None or many <= few:
        return Fit(0, mix.guess)
    each = (many - few) / (mix.probes[1] - mix.probes[0])
    return Fit(max(0.0, few - mix.probes[0] * each), each)
