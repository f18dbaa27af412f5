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

from llmcli.runtime.kv_cache.common_prefix import common_prefix
from llmcli.runtime.kv_cache.context_protocols import SwappedState
from llmcli.runtime.kv_cache.ledger import Ledger

MIN_GAINED_TOKENS = 8  # tokens that must be gained before a state is restored
MAX_TEXTS = 64  # states; each is compared with every new prompt


class IdleOffload:
    """States of finished answers, up to `max_bytes`; the least recently used are dropped first."""

    def __init__(self, ledger: Ledger, max_bytes: int) -> None:
        self.ledger, self.max_bytes, self.nbytes = ledger, max_bytes, 0
        self._token_bytes = 0.0  # unknown before the first state
        self._parked: list[tuple[str, SwappedState]] = []

    def __len__(self) -> int:
        return len(self._parked)

    def offload_idle(self, max_cells: int) -> None:
        """Offload idle slots, least recently used first, until idle cells that no busy slot shares
        number at most `max_cells`. A state above the byte limit stays in the pool.
        """
        ledger = self.ledger
        for slot in ledger.reusable_slots:
            if ledger.used_cells - ledger.busy_cells <= max_cells:
                break
            self._take(slot)
        while self.nbytes > self.max_bytes or len(self._parked) > MAX_TEXTS:
            self.nbytes -= len(self._parked.pop(0)[1].state)

    def _take(self, slot: int) -> None:
        ledger = self.ledger
        count = len(ledger.tokens[slot])
        if count * self._token_bytes > self.max_bytes:
            return
        scope, away = (
            ledger.scopes[slot],
            ledger.swap_out(slot, all_tokens=not ledger.memory.has_complete_states),
        )
        if (own := count - away.start) > MIN_GAINED_TOKENS:
            self._token_bytes = len(away.state) / own
            self._parked.append((scope, away))
            self.nbytes += len(away.state)

    def restore_prefix(self, tokens: Sequence[int], scope: str) -> None:
        """Restore the state with the longest common prefix with `tokens`, if the pool holds clearly
        fewer of them, and then the states that continue it.
        """
        while (
            self._parked
            and self.ledger.n_idle
            and (number := self._best(tokens, scope)) is not None
        ):
            away = self._parked.pop(number)[1]
            self.nbytes -= len(away.state)
            slot = self.ledger.claim_slot(scope)
            back = self.ledger.swap_in(slot, away)
            self.ledger.release(slot)
            if not back:
                return

    def _best(self, tokens: Sequence[int], scope: str) -> int | None:
        """Return the index of the state to restore, or None when none is worth it."""
        ledger, wanted = self.ledger, tokens[:-1]
        known = ledger.match_prefix(tokens, scope)[0]
        whole = not ledger.can_fork  # then a state is useful only if the prompt continues all of it
        alike = [
            (length, number)
            for number, (whose, away) in enumerate(self._parked)
            if whose == scope
            and away.start <= known
            and (length := common_prefix(away.tokens, wanted)) >= known + MIN_GAINED_TOKENS
            and not (whole and length < len(away.tokens))
        ]
        return max(alike)[1] if alike else None
