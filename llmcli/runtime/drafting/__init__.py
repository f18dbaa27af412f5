"""Guesses the next tokens for speculative decoding: one file per drafter.

A guess costs rows of a forward pass (pass_cost.py), so guesses are made only when they are likely
enough to pay (draft_length.py). Guesses never change the distribution of the answer
(strategies/speculative.py).
"""

import functools

from llmcli.runtime.drafting.base import Drafter
from quant.registry import collect


@functools.cache
def drafters() -> dict[str, type[Drafter]]:
    """Return every drafter by name."""
    return collect("llmcli.runtime.drafting", "DRAFTERS")
