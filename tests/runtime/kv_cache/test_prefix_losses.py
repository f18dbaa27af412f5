"""The nearest conversation of a prompt, and why its tokens were not reused."""

from typing import Any

import numpy as np
import pytest

from llmcli.runtime.kv_cache import prefix_losses
from llmcli.runtime.kv_cache.ledger import Ledger
from llmcli.runtime.kv_cache.offload_store import OffloadStore
from llmcli.runtime.kv_cache.prefix_losses import (
    NearestConversation,
    PastConversation,
    PrefixHistory,
    explain_loss,
)
from tests.fixtures.fakes import FakeContext

TEXT = list(range(100, 200))


def make_history() -> PrefixHistory:
    ledger = Ledger(FakeContext(n_ctx=512, n_seq_max=2))
    return PrefixHistory(ledger, OffloadStore(ledger))


def keep(
    history: PrefixHistory,
    number: int,
    tokens: list[int],
    scope: str = "",
    nearest: NearestConversation | None = None,
) -> None:
    conversation = PastConversation(number, np.array(tokens, np.int32), "client", scope, 0)
    history.add(number, conversation, nearest)


def test_the_longest_common_beginning_is_found() -> None:
    history = make_history()
    keep(history, 1, TEXT[:60])
    keep(history, 2, [*TEXT[:40], 5])
    keep(history, 3, [7, *TEXT])
    found = history.find_nearest(TEXT, "")
    assert found and (found.conversation.number, found.shared, found.location) == (1, 60, "nowhere")
    assert history.find_nearest(TEXT[:10], "") is None, "too short"
    assert history.find_nearest([9, *TEXT], "") is None


def test_a_conversation_that_goes_on_keeps_its_number() -> None:
    history = make_history()
    keep(history, 1, TEXT[:30])
    history.finish(1, TEXT[:50])
    found = history.find_nearest(TEXT, "")
    assert found and found.shared == 50
    keep(history, 2, TEXT, nearest=found)
    history.finish(2, [*TEXT, 1])
    found = history.find_nearest([*TEXT, 1, 2], "")
    assert found and (found.conversation.number, found.shared) == (1, 101)


def test_another_scope_counts_only_if_it_has_much_more() -> None:
    history = make_history()
    keep(history, 1, TEXT[:80], scope="b")
    keep(history, 2, TEXT[:70], scope="a")
    found = history.find_nearest(TEXT, "a")
    assert found and (found.conversation.number, found.is_other_scope) == (2, False)
    keep(history, 3, TEXT, scope="b")
    found = history.find_nearest(TEXT, "a")
    assert found and (found.conversation.number, found.is_other_scope) == (3, True)


def test_the_kept_conversations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    history = make_history()
    for number in range(prefix_losses.MAX_CONVERSATIONS + 1):
        keep(history, number, [number, *TEXT])
    assert history.find_nearest([0, *TEXT], "") is None
    assert history.find_nearest([1, *TEXT], "")
    monkeypatch.setattr(prefix_losses, "MAX_TOKENS", 300)
    keep(history, 1000, [1000, *TEXT])
    assert history.find_nearest([prefix_losses.MAX_CONVERSATIONS, *TEXT], "")
    assert history.find_nearest([prefix_losses.MAX_CONVERSATIONS - 1, *TEXT], "") is None


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({}, "dropped"),
        ({"location": "host"}, "offloaded"),
        ({"location": "pool"}, "not_shared"),
        ({"location": "pool", "can_fork": False}, "no_rollback"),
        ({"location": "pool", "is_reproducible": True}, "reproducible"),
        ({"is_reproducible": True}, "dropped"),
        ({"is_other_scope": True}, "other_client"),
        ({"names_slot": True}, "slot"),
        ({"is_scored": True}, "scored"),
        ({"reused": 60}, "different"),
    ],
)
def test_the_reason_is_found(facts: dict[str, Any], reason: str) -> None:
    conversation = PastConversation(1, np.array([*TEXT[:60], 5], np.int32), "client", "", 0)
    nearest = NearestConversation(
        conversation, 60, facts.get("location", "nowhere"), facts.get("is_other_scope", False)
    )
    loss = explain_loss(
        nearest,
        TEXT,
        facts.get("reused", 0),
        is_scored=facts.get("is_scored", False),
        names_slot=facts.get("names_slot", False),
        can_fork=facts.get("can_fork", True),
        is_reproducible=facts.get("is_reproducible", False),
    )
    assert loss and (loss.reason, loss.position) == (reason, 60)
    assert (loss.token, loss.cached_token) == (TEXT[60], 5)
