"""Prompt mixes. Each module of this package exports MIXES, which are generators of prompts of a
given length.

A mix generates an endless sequence of jobs from a seed. Prompts begin differently, so that a
server's prefix cache can reuse only the chat template. If `shared_fraction` is set, all prompts
share this fraction at their beginning.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from llmcli.bench.load.records import LoadJob
from quant.registry import collect


class PromptMix(Protocol):
    """A generator of text in units, which are words or lines.

    The tokens per unit are measured with two prompts of `probe_units` units. If the server does not
    count tokens, `default_unit_tokens` is used.
    """

    name: str
    probe_units: tuple[int, int]
    default_unit_tokens: float

    def text(self, units: int, rng: random.Random) -> str:
        """Return `units` units of random text."""
        ...


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """Lengths of prompts and answers in tokens. `shared_fraction`: the fraction (0 to 1) of each
    prompt that is the same in all prompts. `cancelled_fraction`: the fraction of the requests that
    the client cancels before their answers end.
    """

    prompt_tokens: int = 512
    output_tokens: int = 128
    shared_fraction: float = 0.0
    cancelled_fraction: float = 0.0


@dataclass(frozen=True, slots=True)
class UnitTokens:
    """The tokens of a prompt as a linear function of its units: `template_tokens` for the chat
    template, and `tokens_per_unit` for each unit.
    """

    template_tokens: float
    tokens_per_unit: float

    def count_units(self, tokens: int) -> int:
        """Return how many units a prompt of `tokens` tokens needs, at least one."""
        return max(1, round((tokens - self.template_tokens) / self.tokens_per_unit))


def load_mixes() -> dict[str, PromptMix]:
    """Return all mixes by name."""
    return collect("llmcli.bench.load.mixes", "MIXES")


def generate_jobs(
    mix: PromptMix, lengths: RequestLengths, unit_tokens: UnitTokens, seed: int
) -> Iterator[LoadJob]:
    """Yield jobs endlessly. The same seed gives the same jobs."""
    units = unit_tokens.count_units(lengths.prompt_tokens)
    common = round(units * lengths.shared_fraction)
    # The random generator of the shared part does not depend on the seed, so all loads share it.
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
    """Return the number of chunks after which to cancel a request; None: do not cancel it. Chance
    decides both.
    """
    return (
        rng.randrange(output)
        if lengths.cancelled_fraction and rng.random() < lengths.cancelled_fraction
        else None
    )


def fit_units(mix: PromptMix, fewer_tokens: int | None, more_tokens: int | None) -> UnitTokens:
    """Return the line through the token counts of two prompts, which have `probe_units` units.
    Without usable counts, return the mix's default.
    """
    if fewer_tokens is None or more_tokens is None or more_tokens <= fewer_tokens:
        return UnitTokens(0, mix.default_unit_tokens)
    each = (more_tokens - fewer_tokens) / (mix.probe_units[1] - mix.probe_units[0])
    return UnitTokens(max(0.0, fewer_tokens - mix.probe_units[0] * each), each)
