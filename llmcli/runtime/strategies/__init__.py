"""How rows of logits become an answer: one file per strategy, one object per request."""

import functools

from llmcli.runtime.strategies.base import DecodingStrategy
from quant.registry import collect


@functools.cache
def strategies() -> dict[str, type[DecodingStrategy]]:
    """Return every strategy by name."""
    return collect("llmcli.runtime.strategies", "STRATEGIES")
