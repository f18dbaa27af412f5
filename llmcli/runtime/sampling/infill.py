"""The sampler of llama.cpp for gaps in a text (src/llama-sampler.cpp, llama_sampler_infill). It ends
the answer as soon as the model is unsure, and otherwise keeps the tokens that are clearly likely.

It must run after top-k and top-p, because it compares every pair of the remaining tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from llmcli.runtime.sampling.base import (
    ApplyStep,
    Logits,
    NumberLimits,
    SamplerStep,
    setting,
)
from llmcli.runtime.sampling.truncate import keep_only, softmax
from llmcli.runtime.vocabulary import Vocabulary

END_WEIGHT = 3  # the answer ends if 3 · n · p(end) > p(text) for n remaining tokens
MIN_PROBABILITY = 0.2  # of a kept token, together with the tokens that share its first letters
MAX_COMPARED_TOKENS = 256  # likeliest tokens that are compared with one another


@dataclass(frozen=True, slots=True)
class Infill(SamplerStep):
    """Ends the answer where an end token is likely or no text is. Otherwise, adds the probability
    of each token to the likelier one of two tokens of which one begins with the other, and drops
    the tokens that are still unlikely.
    """

    infill: int = setting(
        0,
        "for the text in a gap: end the answer when the model is unsure, 1 = on, 0 = off",
        NumberLimits(0, 1),
    )
    name: ClassVar[str] = "infill"
    order: ClassVar[int] = 58
    needs_all_steps: ClassVar[bool] = True
    off_values: ClassVar[Mapping[str, Any]] = MappingProxyType({"infill": 0})
    order_names: ClassVar[tuple[str, ...]] = ("infill", "i")

    @property
    def is_neutral(self) -> bool:
        return self.infill == 0

    def __call__(self, logits: Logits, tokens: list[int]) -> Logits:
        return logits

    def bind(self, vocabulary: Vocabulary) -> ApplyStep:
        """Return a function that applies the step with the texts and end tokens of a vocabulary."""
        return partial(self._apply, vocabulary) if self.infill else self

    def _apply(self, vocabulary: Vocabulary, logits: Logits, tokens: list[int]) -> Logits:
        alive = np.flatnonzero(np.isfinite(logits))
        alive = alive[np.argsort(-logits[alive], kind="stable")]
        is_end = np.array([vocabulary.is_end(int(token)) for token in alive])
        p = softmax(logits[alive]).astype(np.float64)
        if END_WEIGHT * p[is_end].sum() * len(alive) > p[~is_end].sum():
            return keep_only(logits, alive[is_end])
        _merge_prefixes([vocabulary.piece(int(token)) for token in alive[:MAX_COMPARED_TOKENS]], p)
        kept = is_end | (p >= MIN_PROBABILITY)
        n_text = int((kept & ~is_end).sum())
        if not n_text:
            return self._only_end(vocabulary, logits)
        share = p / p[kept].sum()
        kept &= is_end | (share >= 1 / (n_text + 1))
        return keep_only(logits, alive[kept & (p > 0)])

    def _only_end(self, vocabulary: Vocabulary, logits: Logits) -> Logits:
        """Return logits in which only the likeliest end token is finite."""
        ends = [token for token in range(vocabulary.n_vocab) if vocabulary.is_end(token)]
        if not ends:
            return logits
        best = max(ends, key=lambda token: logits[token])
        out = np.full_like(logits, -np.inf)
        out[best] = 0
        return out


def _merge_prefixes(pieces: list[bytes], p: np.ndarray) -> None:
    """Add the probability of a token to that of another one where one of the two texts begins with
    the other. The likelier token keeps the sum, and the probability of the other becomes 0.

    Shapes: p `[tokens]`, in descending order; it is changed in place.
    """
    for first, short in enumerate(pieces):
        for second, long in enumerate(pieces):
            if p[first] == 0:
                break
            if first == second or p[second] == 0 or not short or not long.startswith(short):
                continue
            target, source = (second, first) if p[second] > p[first] else (first, second)
            p[target] += p[source]
            p[source] = 0


STEPS = (Infill,)
