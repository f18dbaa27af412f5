"""How rows of logits become an answer: one file per strategy, one object per request."""

import functools

from llmcli.runtime.strategies.base import StrategyType
from quant.registry import collect


@functools.cache
def strategies() -> dict[str, StrategyType]:
    """Return every strategy by name."""
    return collect("llmcli.runtime.strategies", "STRATEGIES")
