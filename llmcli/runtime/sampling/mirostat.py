"""Mirostat (Basu et al. 2021): drops more or fewer unlikely tokens, so that the surprise of the
text stays near a target. The surprise of a token is -log2 of its probability.

As in llama.cpp (src/llama-sampler.cpp, common/sampling.cpp), Mirostat replaces penalties, DRY,
truncation, XTC and dynamic temperature. Logit bias and temperature still apply. Temperature 0 takes
the likeliest token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from llmcli.runtime.sampling.base import (
    Logits,
    NativeStep,
    NumberLimits,
    SamplerStep,
    SelectorStep,
    TokenPicker,
    setting,
)
from llmcli.runtime.sampling.logit_bias import LogitBias
from llmcli.runtime.sampling.temperature import Temperature
from llmcli.runtime.sampling.truncate import draw_token, keep_only, softmax

# Mirostat 1 estimates the exponent of Zipf's law from this many of the likeliest tokens.
ZIPF_TOKENS = 100


@dataclass(frozen=True, slots=True)
class Mirostat(SelectorStep):
    """The settings of Mirostat. A token is drawn from those whose surprise is at most mu. After the
    draw, mu is lowered by eta times the difference between the token's surprise and the target tau.

    Calling the step truncates with mu = 2 · tau, the value for the first token of an answer.
    """

    mirostat: int = setting(
        0, "mirostat version 1 or 2: keeps surprise near a target, 0 = off", NumberLimits(0, 2)
    )
    mirostat_tau: float = setting(
        5.0,
        "mirostat's target surprise, in bits per token",
        NumberLimits(0, 100),
        "--mirostat-ent",
        aliases=("mirostat_ent",),
    )
    mirostat_eta: float = setting(
        0.1,
        "mirostat's learning rate",
        NumberLimits(0, 1),
        "--mirostat-lr",
        aliases=("mirostat_lr",),
    )
    name: ClassVar[str] = "mirostat"
    order: ClassVar[int] = 70

    @property
    def is_neutral(self) -> bool:
        return self.mirostat == 0

    def preceding_steps(self, steps: Sequence[SamplerStep]) -> list[SamplerStep]:
        """Return the logit bias and the temperature, without its dynamic range, if they have an
        effect.
        """
        preceding = [
            replace(step, dynatemp_range=0.0) if isinstance(step, Temperature) else step
            for step in steps
            if isinstance(step, LogitBias | Temperature)
        ]
        return [step for step in preceding if not step.is_neutral]

    def __call__(self, logits: Logits, tokens: list[int]) -> Logits:
        return self.truncate(logits, 2 * self.mirostat_tau)

    def truncate(self, logits: Logits, mu: float) -> Logits:
        """Return the logits with -inf for the tokens whose surprise exceeds `mu` bits. The
        likeliest token is never dropped.

        Shapes: logits `[n_vocab]`, result `[n_vocab]`.
        """
        if self.is_neutral:
            return logits
        alive = np.flatnonzero(np.isfinite(logits))
        if self.mirostat == 1:
            count = _zipf_count(logits[alive], len(logits), mu)
            return keep_only(logits, alive[np.argpartition(logits[alive], -count)[-count:]])
        p = softmax(logits[alive])
        with np.errstate(divide="ignore"):
            kept = alive[-np.log2(p) <= mu]
        return keep_only(logits, kept if len(kept) else np.array([logits.argmax()]))

    def start(self) -> TokenPicker:
        return MirostatPicker(self)

    def native(self) -> tuple[NativeStep, ...] | None:
        # Mirostat 1 always runs in numpy. When the surprise stays below tau for hundreds of tokens,
        # llama.cpp converts a float that is out of range to an int, and then takes the likeliest
        # token until the end of the answer.
        return (
            (("mirostat_v2", (self.mirostat_tau, self.mirostat_eta)),)
            if self.mirostat == 2
            else None
        )


class MirostatPicker:
    """Draws the tokens of one sequence, and adjusts mu after each draw. `mu`: tokens of a higher
    surprise than this, in bits, are not drawn.
    """

    def __init__(self, step: Mirostat) -> None:
        self.step, self.mu = step, 2 * step.mirostat_tau

    def __call__(self, logits: Logits, random: np.random.Generator) -> int:
        kept_logits = self.truncate(logits)
        token = draw_token(kept_logits, random)
        self.record_draw(kept_logits, token)
        return token

    def truncate(self, logits: Logits) -> Logits:
        """Return the logits with -inf for the tokens whose surprise exceeds the present mu."""
        return self.step.truncate(logits, self.mu)

    def record_draw(self, kept_logits: Logits, token: int) -> None:
        """Adjust mu by the surprise of `token`, which was drawn from `kept_logits`."""
        alive = kept_logits[np.isfinite(kept_logits)]
        surprise = np.log2(np.exp(alive - alive.max()).sum()) - (
            kept_logits[token] - alive.max()
        ) / np.log(2)
        self.mu -= self.step.mirostat_eta * (float(surprise) - self.step.mirostat_tau)


def _zipf_count(alive: Logits, n_vocab: int, mu: float) -> int:
    """Return how many of the likeliest tokens Mirostat 1 does not drop, at least 1 (formulas 2 and
    3 of the paper). `alive`: the finite logits. `mu`: the maximum surprise in bits.
    """
    size = min(ZIPF_TOKENS, len(alive))
    top = -np.sort(-np.partition(alive, -size)[-size:].astype(np.float64))
    if size < 2:
        return 1
    ranks = np.arange(1, size)
    steps = np.log((ranks + 1) / ranks)
    exponent = float((steps * -np.diff(top)).sum() / (steps**2).sum())
    excess = exponent - 1
    with np.errstate(all="ignore"):
        share = excess * np.exp2(mu) / (1 - np.float64(n_vocab) ** -excess)
        count = share ** (1 / np.float64(exponent))
    return 1 if np.isnan(count) else int(np.clip(count, 1, len(alive)))


STEPS = (Mirostat,)
