"""How rows of logits become an answer: one file a strategy, one object a request."""

import functools

from llmcli.runtime.strategies.base import Strategy
from quant.registry import collect


@functools.cache
def strategies() -> dict[str, type[Strategy]]:
    """Every strategy by name."""
    return collect("llmcli.runtime.strategies", "STRATEGIES")
