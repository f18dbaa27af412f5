"""Running answers in host memory while a long piece of a prompt is computed.

llama.cpp's CPU attention visits every cell of the pool for each row, so 512 prompt rows beside
other answers take several times as long as alone. Moving an answer out and back costs 16 to 30 µs
per token. Rows of answers are also cheaper in a separate pass, because one tile of 64 rows visits
all cells of the sequences in it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from llmcli.runtime.kv_cache.ledger import Ledger


class DecodeOffload:
    """States of running answers while another sequence is computed, up to `max_bytes` at once."""

    def __init__(self, ledger: Ledger, max_bytes: int) -> None:
        self.ledger, self.max_bytes = ledger, max_bytes
        self._token_bytes = 0.0  # unknown before the first state

    @contextmanager
    def offload_slots(self, slots: Sequence[int]) -> Iterator[None]:
        """Offload the cells that only these slots hold, for the duration of the block. A slot may
        come back empty when cells run short.
        """
        out, left = [], float(self.max_bytes)
        for slot in slots:
            if (count := len(self.ledger.tokens[slot])) * self._token_bytes > left:
                continue
            away = self.ledger.swap_out(slot)
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
                self.ledger.swap_in(slot, away)
