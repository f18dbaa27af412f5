"""Finished answers in host memory instead of the pool.

llama.cpp's CPU attention steps over the mask of every used cell for each row, whichever sequence
owns it, so idle cells slow down every running answer. When a prompt is admitted, idle cells that it
does not share are moved to host memory; a prompt that starts with the same tokens brings them back.
They stay in the pool until then, so that the next turn of the same conversation finds them in
place.

Without flash attention, values are stored by channel and a state is copied in stretches of
consecutive cells, which is slow when cells of several sequences are mixed.
binding/sequence_state.py then reads the whole pool and cuts the sequence out. Offloading after the
prompts instead would leave running answers in higher cells, and every row would still step over the
empty ones below.
"""

from collections.abc import Sequence

from llmcli.runtime.kv_cache.common_prefix import common
from llmcli.runtime.kv_cache.context_protocols import Away
from llmcli.runtime.kv_cache.ledger import Ledger

WORTH = 8  # tokens that must be gained before a state is restored
MOST = 64  # states; each is compared with every new prompt


class Parking:
    """States of finished answers, up to `max_bytes`; the least recently used are dropped first."""

    def __init__(self, ledger: Ledger, most: int) -> None:
        self.ledger, self.most, self.nbytes = ledger, most, 0
        self._token_bytes = 0.0  # unknown before the first state
        self._parked: list[tuple[str, Away]] = []

    def __len__(self) -> int:
        return len(self._parked)

    def tidy(self, cells: int) -> None:
        """Offload idle slots, least recently used first, until idle cells that no busy slot shares
        number at most `max_cells`. A state above the byte limit stays in the pool.
        """
        ledger = self.ledger
        for slot in ledger.left:
            if ledger.used - ledger.taken <= cells:
                break
            self._take(slot)
        while self.nbytes > self.most or len(self._parked) > MOST:
            self.nbytes -= len(self._parked.pop(0)[1].state)

    def _take(self, slot: int) -> None:
        ledger = self.ledger
        count = len(ledger.tokens[slot])
        if count * self._token_bytes > self.most:
            return
        scope, away = (
            ledger.scopes[slot],
            ledger.put_away(slot, whole=not ledger.memory.whole_states),
        )
        if (own := count - away.start) > WORTH:
            self._token_bytes = len(away.state) / own
            self._parked.append((scope, away))
            self.nbytes += len(away.state)

    def fetch(self, tokens: Sequence[int], scope: str) -> None:
        """Restore the state with the longest common prefix with `tokens`, if the pool holds clearly
        fewer of them, and then the states that continue it.
        """
        while (
            self._parked and self.ledger.idle and (number := self._best(tokens, scope)) is not None
        ):
            away = self._parked.pop(number)[1]
            self.nbytes -= len(away.state)
            slot = self.ledger.claim(scope)
            back = self.ledger.bring_back(slot, away)
            self.ledger.release(slot)
            if not back:
                return

    def _best(self, tokens: Sequence[int], scope: str) -> int | None:
        """Return the index of the state to restore, or None when none is worth it."""
        ledger, wanted = self.ledger, tokens[:-1]
        known = ledger.match(tokens, scope)[0]
        whole = not ledger.forks  # then a state is useful only if the prompt continues all of it
        alike = [
            (length, number)
            for number, (whose, away) in enumerate(self._parked)
            if whose == scope
            and away.start <= known
            and (length := common(away.tokens, wanted)) >= known + WORTH
            and not (whole and length < len(away.tokens))
        ]
        return max(alike)[1] if alike else None
