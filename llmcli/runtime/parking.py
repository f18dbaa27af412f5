"""What finished answers leave behind, outside the pool: llama.cpp looks at every cell for every row
it computes.

On a CPU a row of attention steps over the mask of each cell in use, whoever's it is, and from 512
cells on ggml gives each thread its part of them, so that one waits while another has all that
count: 512 idle cells took a lone user a fifth of his tokens a second (136 instead of 176;
SmolLM2-135M, two threads, 2026-11-22). Sixteen answers of 256 tokens took 207 ms a pass in one pool
and 149 in pools of their own. So as a prompt is let in, idle cells that it does not share are taken
out and lie in the host's memory; a prompt that begins alike brings them back, at memory's speed.
Not earlier: whoever goes on with the last answer finds it where it was.

Without flash attention values lie by channel, and each stretch of a text's cells is a copy for each
channel: 96 tokens that were drawn in turn with three others' took 39 ms; read with all cells and
cut out, 2 (binding/state.py). To take them out behind the prompts instead, one a pass, let answers
stand in higher cells, over which each row goes, too: eight users with prompts of 40 tokens 213
tokens a second instead of 230 (2026-11-22).
"""

from collections.abc import Sequence

from llmcli.runtime.ledger import Ledger
from llmcli.runtime.likeness import common
from llmcli.runtime.pool import Away

WORTH = 8  # tokens that must be won: a token's state moves in 4 to 20 µs, computing it takes 500
MOST = 64  # texts: each is compared with every prompt


class Parking:
    """States of texts that nobody continues just now; `most` bytes of them, longest unused dropped
    first.
    """

    def __init__(self, ledger: Ledger, most: int) -> None:
        self.ledger, self.most, self.nbytes = ledger, most, 0
        self._token_bytes = 0.0  # not known before the first
        self._parked: list[tuple[str, Away]] = []

    def __len__(self) -> int:
        return len(self._parked)

    def tidy(self, cells: int) -> None:
        """Take idle slots out, longest unused first, until idle texts alone hold at most `cells`:
        what no slot in use holds as well. One that is too long to be kept stays where it is.
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
        """Bring back what begins most like these tokens, where the pool holds clearly less of them:
        a text, and those that went out as continuations of it.
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
        """Which of the texts to bring back; None: none is worth it."""
        ledger, wanted = self.ledger, tokens[:-1]
        known = ledger.match(tokens, scope)[0]
        whole = not ledger.forks  # then only what is simply continued is of use
        alike = [
            (length, number)
            for number, (whose, away) in enumerate(self._parked)
            if whose == scope
            and away.start <= known
            and (length := common(away.tokens, wanted)) >= known + WORTH
            and not (whole and length < len(away.tokens))
        ]
        return max(alike)[1] if alike else None
