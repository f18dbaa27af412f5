"""Prompts of verse, put together from lines of Shakespeare's sonnets (public domain) in random
order.

After vLLM's sonnet data set: real text, so that a tokenizer, a draft and a cache meet what people
write.
"""

import random
from functools import lru_cache
from pathlib import Path

FILE = Path(__file__).with_name("sonnet.txt")


class Sonnet:
    """So many lines."""

    name = "sonnet"
    probes = (1, 9)
    guess = 12.0

    def text(self, units: int, rng: random.Random) -> str:
        """Lines in random order."""
        return "\n".join(rng.choices(lines(), k=units))


@lru_cache(maxsize=1)
def lines() -> tuple[str, ...]:
    """All lines with words."""
    return tuple(line for line in FILE.read_text("utf-8").splitlines() if line.strip())


MIXES = (Sonnet(),)
