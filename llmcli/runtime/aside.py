"""Answers that go on step out of the pool while much of a prompt is computed: llama.cpp looks at
all cells for a row.

On a CPU 512 rows beside four answers of 600 tokens took 0.90 s, beside sixteen 1.65, alone 0.53;
without flash attention 3.1, 7.9 and 0.93. To the host's memory and back it is 16 to 30 µs a token.
And a row of an answer in a prompt's pass costs more than in one of its own: the tile of 64 rows in
which it stands steps over all its cells. Users with prompts of 512 tokens and answers of 96, four
of them: 36 tokens a second, so 42; eight: 31 and 42; sixteen with prompts of 40: 185 and 214
(SmolLM2-135M, two threads, 2026-11-22).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from llmcli.runtime.ledger import Ledger


class Aside:
    """States of answers while somebody else is computed; `most` bytes of them at once."""

    def __init__(self, ledger: Ledger, most: int) -> None:
        self.ledger, self.most = ledger, most
        self._token_bytes = 0.0  # not known before the first

    @contextmanager
    def stepping(self, slots: Sequence[int]) -> Iterator[None]:
        """The pool without what these slots alone hold. One may come back empty, where cells are
        short after all.
        """
        out, left = [], float(self.most)
        for slot in slots:
            if (count := len(self.ledger.tokens[slot])) * self._token_bytes > left:
                continue
            away = self.ledger.put_away(slot)
            out.append((slot, away))
            left -= len(away.state)
            if own := count - away.start:
                self._token_bytes = max(self._token_bytes, len(away.state) / own)
        try:
            yield
        finally:
            for slot, away in reversed(
                out
            ):  # who went later may hold the beginning of who went before
                self.ledger.bring_back(slot, away)
