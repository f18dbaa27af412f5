"""A kept match equals a new one after any change, and costs nothing while nothing relevant changes."""

import random

import pytest

from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.engine.schedule import Schedule
from llmcli.runtime.kv_cache.cells import CellMap
from llmcli.runtime.kv_cache.ledger import Ledger
from llmcli.runtime.kv_cache.prefix_match import PrefixMatch
from llmcli.runtime.kv_cache.radix_tree import RadixTree
from llmcli.runtime.requests.request import Request
from llmcli.runtime.sampling import default_sampling
from tests.fixtures.fakes import FakeContext, FakeModel

GREEDY = default_sampling().with_values({"temp": 0})


def text(rng: random.Random, longest: int = 9) -> list[int]:
    return rng.choices((1, 2), k=rng.randint(1, longest))


@pytest.mark.parametrize("seed", range(30))
def test_a_kept_match_equals_a_new_one_after_any_change(seed: int) -> None:
    rng = random.Random(seed)
    memory = FakeContext(n_ctx=4096, n_seq_max=6)
    ledger = Ledger(memory)
    prompts = [(text(rng), rng.choice("ab")) for _ in range(8)]
    matches = [PrefixMatch() for _ in prompts]
    for _ in range(120):
        busy = ledger.busy_slots
        change = rng.random()
        if change < 0.3 and ledger.n_idle:
            ledger.claim_slot_for(text(rng), scope=rng.choice("ab"))
        elif change < 0.45 and busy:
            ledger.release(rng.choice(busy))
        elif change < 0.9 and busy:
            slot, tokens = rng.choice(busy), text(rng, 3)
            for token in tokens:
                memory.set_token(slot, token)
            ledger.append(slot, tokens)
        elif busy:
            slot = rng.choice(busy)
            ledger.trim(slot, rng.randint(0, len(ledger.tokens[slot])))
        ledger.check()
        for (prompt, scope), match in zip(prompts, matches, strict=True):
            if rng.random() < 0.7:
                assert ledger.match_prefix(prompt, scope, match) == ledger.match_prefix(
                    prompt, scope
                )


def test_busy_cells_are_counted_without_comparing_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = FakeContext(n_ctx=1 << 16, n_seq_max=64)
    ledger = Ledger(memory)
    for number in range(64):
        slot, reused = ledger.claim_slot_for((*range(100), *[number] * 50)) or (-1, 0)
        tokens = [*range(100), *[number] * 50][reused:]
        for token in tokens:
            memory.set_token(slot, token)
        ledger.append(slot, tokens)
    monkeypatch.setattr(CellMap, "count_shared", None)  # a call fails
    assert ledger.busy_cells == 100 + 64 * 50


def test_waiting_requests_are_not_matched_again_in_each_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    prefixes = RadixTree.prefixes

    def counted(self: RadixTree, *arguments: object) -> object:
        calls.append(1)
        return prefixes(self, *arguments)  # type: ignore[arg-type]

    context = FakeContext(n_ctx=512, n_seq_max=8, n_batch=16, reply=lambda tokens: 97)
    engine = Engine(context, FakeModel(), None, schedule=Schedule(max_gap_seconds=0.5))
    engine.submit(Request(tuple(b"x" * 250), GREEDY, 200, ignore_eos=True))
    for _ in range(20):
        engine.step()
    for number in range(4):
        engine.submit(Request(tuple(bytes([number]) * 400), GREEDY, 4, ignore_eos=True))
    engine.step()
    monkeypatch.setattr(RadixTree, "prefixes", counted)
    for _ in range(50):
        engine.step()
    assert engine.stats.n_waiting == 4
    assert not calls
