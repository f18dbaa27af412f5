"""Prompt mixes: generators of prompts of a given length. Each module of this package exports its
generators as MIXES.

A mix generates an endless sequence of requests from a seed. Prompts begin differently, so that a
server's prefix cache can reuse only the chat template. If `shared_fraction` is set, this fraction
at the beginning of every prompt is the same text.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from llmcli.bench.load.records import LoadJob
from quant.registry import collect


class PromptMix(Protocol):
    """A generator of random text that consists of units, which are words or lines.

    The number of tokens per unit is measured by sending two prompts of `probe_units` units to the
    server. If the server does not count tokens, `default_unit_tokens` is used instead.
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
    the client cancels before the answer is complete.
    """

    prompt_tokens: int = 512
    output_tokens: int = 128
    shared_fraction: float = 0.0
    cancelled_fraction: float = 0.0


@dataclass(frozen=True, slots=True)
class UnitTokens:
    """The number of tokens of a prompt as a linear function of its number of units:
    `template_tokens` for the chat template, plus `tokens_per_unit` for each unit.
    """

    template_tokens: float
    tokens_per_unit: float

    def count_units(self, tokens: int) -> int:
        """Return the number of units, at least one, with which a prompt has about `tokens`
        tokens.
        """
        return max(1, round((tokens - self.template_tokens) / self.tokens_per_unit))


def load_mixes() -> dict[str, PromptMix]:
    """Return all mixes of this package by name."""
    return collect("llmcli.bench.load.mixes", "MIXES")


def generate_jobs(
    mix: PromptMix, lengths: RequestLengths, unit_tokens: UnitTokens, seed: int
) -> Iterator[LoadJob]:
    """Yield requests endlessly. The same seed gives the same requests. `unit_tokens`: the tokens
    per unit on this server.
    """
    units = unit_tokens.count_units(lengths.prompt_tokens)
    shared_units = round(units * lengths.shared_fraction)
    # The seed does not affect the shared text, so it is the same in all loads.
    prefix = (
        mix.text(shared_units, random.Random(f"shared {mix.name} {shared_units}"))
        if shared_units
        else ""
    )
    rng = random.Random(f"{seed} {mix.name}")
    while True:
        text = mix.text(max(1, units - shared_units), rng)
        yield LoadJob(
            text,
            lengths.output_tokens,
            prefix,
            cancel_after=draw_cancellation(lengths, lengths.output_tokens, rng),
        )


def draw_cancellation(lengths: RequestLengths, output: int, rng: random.Random) -> int | None:
    """Decide randomly whether the client cancels a request, and when. Returns the number of chunks
    after which it cancels; None: never. `output`: the maximum number of tokens of the answer.
    """
    return (
        rng.randrange(output)
        if lengths.cancelled_fraction and rng.random() < lengths.cancelled_fraction
        else None
    )


def fit_units(mix: PromptMix, fewer_tokens: int | None, more_tokens: int | None) -> UnitTokens:
    """Return the linear function through two measured prompts. `fewer_tokens`, `more_tokens`: the
    token counts of the prompts with `probe_units[0]` and `probe_units[1]` units. If a count is
    missing or the counts do not increase, return the mix's default.
    """
    if fewer_tokens is None or more_tokens is None or more_tokens <= fewer_tokens:
        return UnitTokens(0, mix.default_unit_tokens)
    each = (more_tokens - fewer_tokens) / (mix.probe_units[1] - mix.probe_units[0])
    return UnitTokens(max(0.0, fewer_tokens - mix.probe_units[0] * each), each)
