"""Running answers in host memory while a long piece of a prompt is computed.

llama.cpp's CPU attention visits every cell of the pool for each row, so 512 prompt rows beside
other answers take several times as long as alone. Moving an answer out and back costs 16 to 30 µs
per token. Rows of answers are also cheaper in a separate pass, because one tile of 64 rows visits
all cells of the sequences in it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from llmcli.runtime.kv_cache.ledger import Ledger


class Aside:
    """States of running answers while another sequence is computed, up to `max_bytes` at once."""

    def __init__(self, ledger: Ledger, most: int) -> None:
        self.ledger, self.most = ledger, most
        self._token_bytes = 0.0  # unknown before the first state

    @contextmanager
    def stepping(self, slots: Sequence[int]) -> Iterator[None]:
        """Offload the cells that only these slots hold, for the duration of the block. A slot may
        come back empty when cells run short.
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
            ):  # a later state may contain the prefix of an earlier one
                self.ledger.bring_back(slot, away)
