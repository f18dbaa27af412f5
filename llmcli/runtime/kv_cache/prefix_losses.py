"""Finds out why a prompt was not found in the cache as far as it continues an earlier conversation:
where it leaves the conversation, or why the tokens before that place were not reused.

The tokens of the latest conversations are kept for this, also after their cells were dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.kv_cache.common_prefix import common_prefix
from llmcli.runtime.kv_cache.ledger import Ledger
from llmcli.runtime.kv_cache.offload_store import OffloadStore

MAX_CONVERSATIONS = 64
MAX_TOKENS = 1 << 20  # of all kept conversations together, 4 bytes each
MIN_LOST_TOKENS = 16  # a shorter common beginning, or a shorter loss of one, is not reported

# different: the prompt differs there. The others say why the common beginning was not reused:
# dropped: its cells were dropped; offloaded: its state is in host memory, and copying it back takes
# longer than computing, or there is no room; no_rollback: the cache of the model cannot go back to
# every token; reproducible: --reproducible shares no such beginning; not_shared: a running answer has
# it and cannot share it; other_client: only another client has it (--private); slot: the request
# names another slot; scored: the request asks for log-probabilities of its prompt.
LossReason = Literal[
    "different",
    "dropped",
    "offloaded",
    "no_rollback",
    "reproducible",
    "not_shared",
    "other_client",
    "slot",
    "scored",
]
CellLocation = Literal["pool", "host", "nowhere"]
Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class PastConversation:
    """The tokens of a conversation. `number`: the id of the sequence that began it. `client`, `slot`:
    those of its last request. `scope`: only prompts of this scope may reuse it.
    """

    number: int
    tokens: Tokens
    client: str
    scope: str
    slot: int


@dataclass(frozen=True, slots=True)
class NearestConversation:
    """The conversation that has the longest common beginning with a prompt. `shared`: the length of
    this beginning. `location`: where its cells are. `is_other_scope`: the prompt may not reuse it.
    """

    conversation: PastConversation
    shared: int
    location: CellLocation
    is_other_scope: bool


@dataclass(frozen=True, slots=True)
class PrefixLoss:
    """Why a prompt was not found in the cache.

    - `shared`: tokens that the prompt and the conversation have in common. `reused`: those of the
      prompt that were in the cache.
    - `position`: where the prompt leaves the conversation, and there `token` of the prompt and
      `cached_token` of the conversation; None if it is no difference.
    """

    conversation: PastConversation
    reason: LossReason
    shared: int
    reused: int
    position: int | None = None
    token: int | None = None
    cached_token: int | None = None


class PrefixHistory:
    """The latest conversations of an engine."""

    def __init__(self, ledger: Ledger, store: OffloadStore) -> None:
        self._ledger, self._store = ledger, store
        # by the id of the last sequence of each, the latest last
        self._conversations: dict[int, PastConversation] = {}
        self._n_tokens = 0

    def find_nearest(self, tokens: Sequence[int], scope: str) -> NearestConversation | None:
        """Return the conversation that has the longest common beginning with a prompt, one of the
        scope unless another one has much more. Return None if no beginning is long enough. It must
        be called before a slot is claimed for the prompt.
        """
        best: dict[bool, tuple[int, PastConversation]] = {}
        prompt = np.array(tokens, np.int32)
        for conversation in self._conversations.values():
            shared = _common_length(conversation.tokens, prompt)
            is_other = conversation.scope != scope
            if shared >= MIN_LOST_TOKENS and (is_other not in best or shared >= best[is_other][0]):
                best[is_other] = shared, conversation
        is_other = True in best and (
            False not in best or best[True][0] >= best[False][0] + MIN_LOST_TOKENS
        )
        if is_other not in best:
            return None
        shared, conversation = best[is_other]
        location = self._locate_cells(tokens[:shared], conversation.scope)
        return NearestConversation(conversation, shared, location, is_other)

    def _locate_cells(self, tokens: Sequence[int], scope: str) -> CellLocation:
        """Return where the cells of these tokens are."""
        ledger, count = self._ledger, len(tokens)
        if any(
            ledger.scopes[slot] == scope and common_prefix(cached, tokens) == count
            for slot, cached in enumerate(ledger.tokens)
        ):
            return "pool"
        return "host" if self._store.idle_prefix(tokens, scope) == count else "nowhere"

    def add(
        self, sequence: int, conversation: PastConversation, nearest: NearestConversation | None
    ) -> None:
        """Keep the conversation of a sequence. `nearest`: the nearest one. If the new conversation
        continues it to its end, it takes its place and its number.
        """
        if nearest and nearest.shared == len(nearest.conversation.tokens):
            earlier = nearest.conversation
            old = next((key for key, one in self._conversations.items() if one is earlier), None)
            if old is not None:
                self._drop(old)
            conversation = replace(conversation, number=earlier.number)
        self._keep(sequence, conversation)

    def finish(self, sequence: int, tokens: Sequence[int]) -> None:
        """Keep the prompt and the answer of a sequence that has ended, if its prompt is kept."""
        if (conversation := self._conversations.get(sequence)) is not None:
            self._drop(sequence)
            self._keep(sequence, replace(conversation, tokens=np.array(tokens, np.int32)))

    def _keep(self, sequence: int, conversation: PastConversation) -> None:
        self._conversations[sequence] = conversation
        self._n_tokens += len(conversation.tokens)
        while len(self._conversations) > MAX_CONVERSATIONS or (
            self._n_tokens > MAX_TOKENS and len(self._conversations) > 1
        ):
            self._drop(next(iter(self._conversations)))

    def _drop(self, sequence: int) -> None:
        self._n_tokens -= len(self._conversations.pop(sequence).tokens)


def _common_length(first: Tokens, second: Tokens) -> int:
    """Return the length of the common beginning of two texts. It is compared at once, because the
    engine waits.
    """
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    position = int(differs.argmax()) if length else 0
    return position if length and differs[position] else length


def explain_loss(
    nearest: NearestConversation,
    tokens: Sequence[int],
    reused: int,
    *,
    is_scored: bool,
    names_slot: bool,
    can_fork: bool,
    is_reproducible: bool,
) -> PrefixLoss | None:
    """Return why a prompt was not found in the cache as far as it could be; None if it was, and does
    not leave the conversation. `tokens`: those of the prompt. `reused`: how many of them were in
    the cache. `is_scored`, `names_slot`: what its request asks for. `can_fork`: whether slots may
    diverge at every token. `is_reproducible`: whether --reproducible is on.
    """
    conversation, shared = nearest.conversation, nearest.shared
    # the last token of a prompt is always computed
    is_reused = min(shared, len(tokens) - 1) - reused < MIN_LOST_TOKENS
    leaves = shared < min(len(conversation.tokens), len(tokens))
    if is_reused and not leaves:
        return None
    reason: LossReason = "different"
    if not is_reused:
        reason = _reason(
            nearest,
            is_scored=is_scored,
            names_slot=names_slot,
            can_fork=can_fork,
            is_reproducible=is_reproducible,
        )
    difference = (shared, tokens[shared], int(conversation.tokens[shared])) if leaves else ()
    return PrefixLoss(conversation, reason, shared, reused, *difference)


def _reason(
    nearest: NearestConversation,
    *,
    is_scored: bool,
    names_slot: bool,
    can_fork: bool,
    is_reproducible: bool,
) -> LossReason:
    """Return why the common beginning of a prompt and a conversation was not reused."""
    if is_scored:
        return "scored"
    if nearest.is_other_scope:
        return "other_client"
    if names_slot:
        return "slot"
    if nearest.location == "pool" and is_reproducible:
        return "reproducible"
    if nearest.location == "pool":
        return "not_shared" if can_fork else "no_rollback"
    return "offloaded" if nearest.location == "host" else "dropped"
