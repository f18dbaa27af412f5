"""Decoding strategies: plain, grammar-guided, speculative and beam search. Each module here
implements one strategy; each request gets its own strategy object.
"""

import functools

from llmcli.runtime.strategies.base import StrategyType
from quant.registry import collect


@functools.cache
def strategies() -> dict[str, StrategyType]:
    """Return every strategy class by its `name`, collected from the modules of this folder."""
    return collect("llmcli.runtime.strategies", "STRATEGIES")
