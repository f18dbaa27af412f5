"""Prompts of verse: lines of Shakespeare's sonnets (public domain) in random order.

Tokenizers, draft models and caches behave more realistically with real text than with random words.
Source: vLLM's sonnet data set.
"""

import random
from functools import lru_cache
from pathlib import Path

SONNET_FILE = Path(__file__).with_name("sonnet.txt")


class SonnetMix:
    """A mix of verse. A unit is a line."""

    name = "sonnet"
    probe_units = (1, 9)
    default_unit_tokens = 12.0

    def text(self, units: int, rng: random.Random) -> str:
        """Return `units` lines in random order."""
        return "\n".join(rng.choices(sonnet_lines(), k=units))


@lru_cache(maxsize=1)
def sonnet_lines() -> tuple[str, ...]:
    """Return all non-empty lines of the sonnets."""
    return tuple(line for line in SONNET_FILE.read_text("utf-8").splitlines() if line.strip())


MIXES = (SonnetMix(),)
