"""Prompt mixes: each module exports MIXES, ways to write a prompt of a given length.

A mix generates an endless sequence of jobs from a seed. By default no two prompts have the same
beginning, so that a server's prefix cache can reuse only the template; a fraction of every prompt
can be shared on request.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from llmcli.bench.load.records import LoadJob
from quant.registry import collect


class PromptMix(Protocol):
    """A generator of text in units: words or lines.

    The token counts of two prompts of `probe_units` units give the tokens per unit;
    `default_unit_tokens` is used if the server does not count tokens.
    """

    name: str
    probe_units: tuple[int, int]
    default_unit_tokens: float

    def text(self, units: int, rng: random.Random) -> str:
        """Return `units` units of random text."""
        ...


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """Lengths of prompts and answers in tokens. `shared_fraction` (0 to 1) of each prompt is common
    to all; `cancelled_fraction` of the requests are canceled early.
    """

    prompt_tokens: int = 512
    output_tokens: int = 128
    shared_fraction: float = 0.0
    cancelled_fraction: float = 0.0


@dataclass(frozen=True, slots=True)
class UnitTokens:
    """Tokens of a prompt as a linear function of its units: those of the template, and
    those of each unit.
    """

    template_tokens: float
    tokens_per_unit: float

    def count_units(self, tokens: int) -> int:
        """Return the units for a number of tokens, at least one."""
        return max(1, round((tokens - self.template_tokens) / self.tokens_per_unit))


def load_mixes() -> dict[str, PromptMix]:
    """Return all mixes by name."""
    return collect("llmcli.bench.load.mixes", "MIXES")


def generate_jobs(
    mix: PromptMix, lengths: RequestLengths, unit_tokens: UnitTokens, seed: int
) -> Iterator[LoadJob]:
    """Yield jobs endlessly; the same ones for the same seed."""
    units = unit_tokens.count_units(lengths.prompt_tokens)
    common = round(units * lengths.shared_fraction)
    # The shared part depends only on the mix and its length, so that all seeds of a load share it.
    prefix = mix.text(common, random.Random(f"shared {mix.name} {common}")) if common else ""
    rng = random.Random(f"{seed} {mix.name}")
    while True:
        text = mix.text(max(1, units - common), rng)
        yield LoadJob(
            text,
            lengths.output_tokens,
            prefix,
            cancel_after=draw_cancellation(lengths, lengths.output_tokens, rng),
        )


def draw_cancellation(lengths: RequestLengths, output: int, rng: random.Random) -> int | None:
    """Return the chunk after which this request is canceled; None: it is not."""
    return (
        rng.randrange(output)
        if lengths.cancelled_fraction and rng.random() < lengths.cancelled_fraction
        else None
    )


def fit_units(mix: PromptMix, fewer_tokens: int | None, more_tokens: int | None) -> UnitTokens:
    """Return the line through the token counts of two prompts of `probe_units` units, or the mix's
    guess if there are no counts.
    """
    if fewer_tokens is None or more_tokens is None or more_tokens <= fewer_tokens:
        return UnitTokens(0, mix.default_unit_tokens)
    each = (more_tokens - fewer_tokens) / (mix.probe_units[1] - mix.probe_units[0])
    return UnitTokens(max(0.0, fewer_tokens - mix.probe_units[0] * each), each)
