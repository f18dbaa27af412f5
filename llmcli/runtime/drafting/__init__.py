"""Guessing the tokens that come next, for speculative decoding: one file a drafter.

A guess costs rows of a forward pass (curve.py), and is made where it is likely enough to pay
(pace.py). What is guessed never changes what is answered: strategies/speculative.py sees to that.
"""

import functools

from llmcli.runtime.drafting.base import Drafter
from quant.registry import collect


@functools.cache
def drafters() -> dict[str, type[Drafter]]:
    """Every drafter by name."""
    return collect("llmcli.runtime.drafting", "DRAFTERS")
