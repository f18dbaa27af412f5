"""What is asked: each module exports MIXES, ways to write a prompt of about so many units of text.

A mix makes endless jobs from a seed. By default no two of them are alike from their first word on,
so that a server's prefix cache has nothing to reuse but the template; `shared` is the part of every
prompt that all have in common.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from llmcli.bench.load.records import Job
from quant.registry import collect


class Mix(Protocol):
    """Text by the unit: words, or lines. Two prompts of `probes` units tell how many tokens a unit
    is, `guess` where a server does not count.
    """

    name: str
    probes: tuple[int, int]
    guess: float

    def text(self, units: int, rng: random.Random) -> str:
        """So many units of text, other ones each time."""
        ...


@dataclass(frozen=True, slots=True)
class Shape:
    """How long prompts and answers are, in tokens; `shared` (0 to 1) of a prompt is the same in
    all, and `cancel` of the clients go away before the end.
    """

    prompt: int = 512
    output: int = 128
    shared: float = 0.0
    cancel: float = 0.0


@dataclass(frozen=True, slots=True)
class Fit:
    """Tokens of a prompt by its units, as a server counted them: `base` (its template) and `each`."""

    base: float
    each: float

    def units(self, tokens: int) -> int:
        """Units for so many tokens, at least one."""
        return max(1, round((tokens - self.base) / self.each))


def mixes() -> dict[str, Mix]:
    """All of them, by name."""
    return collect("llmcli.bench.load.mixes", "MIXES")


def jobs(mix: Mix, shape: Shape, fit: Fit, seed: int) -> Iterator[Job]:
    """Endless jobs; the same ones for the same seed."""
    units = fit.units(shape.prompt)
    common = round(units * shape.shared)
    # What is shared hangs on the mix and its length alone: all seeds of one load have it in common.
    prefix = mix.text(common, random.Random(f"shared {mix.name} {common}")) if common else ""
    rng = random.Random(f"{seed} {mix.name}")
    while True:
        text = mix.text(max(1, units - common), rng)
        yield Job(text, shape.output, prefix, cancel_after=leaves(shape, shape.output, rng))


def leaves(shape: Shape, output: int, rng: random.Random) -> int | None:
    """After which chunk this client goes away; None: it stays."""
    return rng.randrange(output) if shape.cancel and rng.random() < shape.cancel else None


def fitted(mix: Mix, few: int | None, many: int | None) -> Fit:
    """The line through the tokens of two prompts of `probes` units; without a server's counts what
    a mix guesses.
    """
    if few is None or many is None or many <= few:
        return Fit(0, mix.guess)
    each = (many - few) / (mix.probes[1] - mix.probes[0])
    return Fit(max(0.0, few - mix.probes[0] * each), each)
