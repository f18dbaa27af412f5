"""What finished answers leave behind, outside the pool: llama.cpp looks at every cell for every row it computes.

On a CPU a row of attention steps over the mask of each cell in use, whoever's it is (ggml's flash attention, the path
for few rows): sixteen answers of 256 tokens took 207 ms a pass in one pool and 149 in pools of their own (SmolLM2-135M,
one thread's time, 2026-11). So idle cells beyond a few are taken out and lie in the host's memory; a prompt that
begins alike brings them back, at memory's speed.
"""

from collections.abc import Sequence

from llmcli.runtime.ledger import Ledger
from llmcli.runtime.likeness import common
from llmcli.runtime.pool import Away

WORTH = 32  # tokens that must be won


class Parking:
    """States of texts that nobody continues just now; `most` bytes of them, longest unused dropped first."""

    def __init__(self, ledger: Ledger, most: int) -> None:
        self.ledger, self.most, self.nbytes = ledger, most, 0
        self._parked: list[tuple[str, Away]] = []

    def __len__(self) -> int:
        return len(self._parked)

    def tidy(self, cells: int) -> None:
        """Take idle slots out, longest unused first, until idle texts alone hold at most `cells`."""
        ledger = self.ledger
        while ledger.used - ledger.taken > cells:
            slot = ledger.left[0]
            scope, away = ledger.scopes[slot], ledger.put_away(slot, whole=True)
            if len(away.state) <= self.most and len(away.tokens) > WORTH:
                self._parked.append((scope, away))
                self.nbytes += len(away.state)
        while self.nbytes > self.most:
            self.nbytes -= len(self._parked.pop(0)[1].state)

    def fetch(self, tokens: Sequence[int], scope: str) -> None:
        """Bring back the text that begins most like these tokens, where the pool holds clearly less of them."""
        ledger = self.ledger
        if not self._parked or not ledger.idle:
            return
        known = ledger.match(tokens, scope)[0]
        whole = not ledger.forks  # then only what is simply continued is of use
        alike = [
            (length, number)
            for number, (whose, away) in enumerate(self._parked)
            if whose == scope
            and (length := common(away.tokens, tokens[:-1])) >= known + WORTH
            and not (whole and length < len(away.tokens))
        ]  # fmt: skip
        if not alike:
            return
        _, away = self._parked.pop(max(alike)[1])
        self.nbytes -= len(away.state)
        slot = ledger.claim(scope)
        ledger.bring_back(slot, away)
        ledger.release(slot)
