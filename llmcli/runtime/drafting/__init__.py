"""Drafts tokens for speculative decoding. There is one file per drafter.

Checking a draft costs rows of a forward pass (gain/pass_cost.py), so tokens are drafted only when their
chances are good enough to save time (draft_length.py). Drafts never change the distribution of the
answer (strategies/speculative.py).
"""

import functools

from llmcli.runtime.drafting.base import Drafter
from quant.registry import collect


@functools.cache
def drafters() -> dict[str, type[Drafter]]:
    """Return all drafter classes by name."""
    return collect("llmcli.runtime.drafting", "DRAFTERS")
