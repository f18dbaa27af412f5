"""The ledger's record of cells agrees with the cache after any operation, and slots are chosen and
evicted in the documented order.
"""

import random

import pytest

from llmcli.runtime.kv_cache.common_prefix import common_prefix
from llmcli.runtime.kv_cache.ledger import Ledger
from llmcli.runtime.kv_cache.radix_tree import RadixTree
from tests.fixtures.fakes import FakeContext


def fill(ledger: Ledger, memory: FakeContext, tokens: tuple[int, ...]) -> tuple[int, int]:
    """Claim a slot for a prompt and compute the tokens that are not cached, as the engine does.
    Return the slot and the number of cached tokens.
    """
    claimed = ledger.claim_slot_for(tokens)
    assert claimed is not None
    slot, reused = claimed
    missing = list(tokens[reused:])
    for token in missing:
        memory.set_token(slot, token)
    ledger.append(slot, missing)
    return slot, reused


def test_a_prompt_that_continues_an_idle_slot_reuses_its_tokens():
    memory = FakeContext()
    ledger = Ledger(memory)
    slot, _ = fill(ledger, memory, (1, 2, 3))
    ledger.release(slot)
    assert ledger.claim_slot_for((1, 2, 3, 4, 5)) == (slot, 3)


def test_the_last_token_of_a_prompt_is_always_computed_again():
    memory = FakeContext()
    ledger = Ledger(memory)
    ledger.release(fill(ledger, memory, (1, 2, 3))[0])
    assert ledger.claim_slot_for((1, 2, 3)) == (0, 2)


def test_a_prefix_of_a_busy_slot_is_shared_and_counted_once():
    memory = FakeContext(n_seq_max=2)
    ledger = Ledger(memory)
    fill(ledger, memory, (1, 2, 3, 4))
    assert fill(ledger, memory, (1, 2, 3, 9)) == (1, 3)
    assert ledger.used_cells == memory.used == 5
    ledger.check()


def test_a_prefix_outside_the_sliding_window_is_not_reused():
    memory = FakeContext(n_swa=4)
    ledger = Ledger(memory)
    ledger.release(fill(ledger, memory, tuple(range(10)))[0])
    assert ledger.claim_slot_for((0, 1, 2, 3, 99)) == (0, 0)


def test_a_slot_is_emptied_when_an_interrupted_pass_has_dropped_window_cells():
    memory = FakeContext(n_swa=4)
    ledger = Ledger(memory)
    slot, _ = fill(ledger, memory, tuple(range(10)))
    for token in range(6):  # the tokens that the pass had computed when it was interrupted
        memory.set_token(slot, token)
    ledger.restore(slot)
    ledger.release(slot)
    ledger.check()
    assert ledger.claim_slot_for((*range(10), 99)) == (slot, 0)


def test_recurrent_state_is_reused_only_as_a_whole():
    memory = FakeContext(is_recurrent=True)
    ledger = Ledger(memory)
    ledger.release(fill(ledger, memory, (1, 2, 3))[0])
    assert ledger.claim_slot_for((1, 2, 3, 4)) == (0, 3)
    ledger.release(0)
    assert ledger.claim_slot_for((1, 2, 9)) == (0, 0)


def test_make_room_evicts_the_least_recently_used_slot():
    memory = FakeContext(n_ctx=8, n_seq_max=3)
    ledger = Ledger(memory)
    slots = [fill(ledger, memory, (n, n, n))[0] for n in (1, 2)]
    for slot in slots:
        ledger.release(slot)
    assert ledger.make_room(4)
    assert [len(tokens) for tokens in ledger.tokens] == [0, 3, 0]
    ledger.check()


def test_no_slot_is_claimed_while_every_slot_is_busy():
    memory = FakeContext()
    ledger = Ledger(memory)
    fill(ledger, memory, (1, 2))
    assert ledger.claim_slot_for((3, 4)) is None


@pytest.mark.parametrize("seed", range(30))
def test_ledger_and_memory_agree_after_any_mix_of_requests(seed):
    rng = random.Random(seed)
    memory = FakeContext(n_ctx=64, n_seq_max=4)
    ledger = Ledger(memory)
    busy: list[int] = []
    for _ in range(80):
        if busy and rng.random() < 0.5:
            slot = busy.pop(rng.randrange(len(busy)))
            if rng.random() < 0.3:
                ledger.trim(slot, rng.randint(0, len(ledger.tokens[slot])))
            ledger.release(slot)
        elif len(busy) < 4:
            prompt = tuple(rng.choice(((1, 2, 3, 4), (1, 2, 7), (9,)))) + tuple(
                rng.choices(range(3), k=rng.randint(1, 6))
            )
            if ledger.make_room(len(prompt)):
                busy.append(fill(ledger, memory, prompt)[0])
        ledger.check()
        assert ledger.used_cells == memory.used


@pytest.mark.parametrize("seed", range(30))
def test_ledger_and_memory_agree_after_any_mix_of_forks(seed):
    rng = random.Random(seed)
    memory = FakeContext(n_ctx=10_000, n_seq_max=6)
    ledger = Ledger(memory)
    slots = [fill(ledger, memory, (1, 2, 3, 4))[0], *(ledger.claim_slot() for _ in range(4))]
    for _ in range(60):
        source, target = rng.sample([slot for slot in slots if ledger.tokens[slot]] + slots, 2)
        if source != target:
            ledger.fork(source, target)
            assert ledger.tokens[target] == ledger.tokens[source]
        for slot in rng.sample(slots, 3):
            token = rng.randrange(3)
            memory.set_token(slot, token)
            ledger.append(slot, [token])
        if rng.random() < 0.3:
            ledger.trim(rng.choice(slots), rng.randrange(5))
        ledger.check()
        assert ledger.used_cells == memory.used
    prompt = [*ledger.tokens[slots[2]], 7]
    best = ledger.keep_best_branch(slots, prompt)
    ledger.check()
    assert ledger.tokens[best] == prompt[:-1]
    assert ledger.used_cells == memory.used == len(prompt) - 1
    assert ledger.n_idle == 5


def test_a_slot_of_an_earlier_turn_is_cut_and_reused():
    memory = FakeContext(n_seq_max=4)
    ledger = Ledger(memory)
    slot, _ = fill(ledger, memory, (1, 2, 3))
    ledger.release(slot, turn=1)
    # The template renders the answer with other tokens than were generated, so the slot's tokens
    # after the common prefix will not be needed again.
    assert ledger.claim_slot_for((1, 2, 9, 9), earlier_turns=frozenset({1})) == (slot, 2)


def test_a_branch_of_a_conversation_overwrites_the_least_recently_used_slot():
    memory = FakeContext(n_seq_max=3)
    ledger = Ledger(memory)
    for turn, last in enumerate((3, 4, 5), 1):
        slot, reused = fill(ledger, memory, (1, 2, last, last))
        assert reused == (2 if turn > 1 else 0)
        ledger.release(slot, turn)
    assert ledger.used_cells == 2 + 3 * 2
    slot, reused = fill(ledger, memory, (1, 2, 6, 6))
    assert (slot, reused) == (0, 2)  # the least recently used slot
    ledger.release(slot, 4)
    assert [tokens[2] for tokens in ledger.tokens] == [6, 4, 5]
    assert ledger.find_nearest((1, 2, 4, 4, 9)) == (1, 4)


def turns(*sizes: int) -> list[list[int]]:
    """Return one token list per size. No two lists have a token in common."""
    return [list(range(100 * number, 100 * number + size)) for number, size in enumerate(sizes, 1)]


def test_the_cells_after_a_dropped_turn_are_moved():
    memory = FakeContext()
    ledger = Ledger(memory)
    system, first_turn, second_turn, third_turn = turns(5, 30, 40, 20)
    slot, _ = fill(ledger, memory, (*system, *first_turn, *second_turn))
    assert ledger.apply_overflow(slot, [*system, *second_turn, *third_turn], can_move=True) == 45
    assert ledger.tokens[slot] == [*system, *second_turn]
    assert ledger.used_cells == memory.used == 45
    ledger.check()


def test_a_prompt_may_leave_out_several_turns():
    memory = FakeContext()
    ledger = Ledger(memory)
    system, first_turn, second_turn, third_turn, fourth_turn = turns(5, 30, 40, 20, 25)
    ledger.release(
        fill(ledger, memory, (*system, *first_turn, *second_turn, *third_turn, *fourth_turn))[0]
    )
    assert ledger.claim_slot_for((*system, *second_turn, *fourth_turn, 7, 8), can_move=True) == (
        0,
        70,
    )
    ledger.check()


@pytest.mark.parametrize(
    "memory_options", [{"can_shift": False}, {"is_recurrent": True, "can_shift": False}]
)
def test_cells_that_cannot_be_moved_are_recomputed(memory_options: dict[str, bool]):
    memory = FakeContext(**memory_options)
    ledger = Ledger(memory)
    system, first_turn, second_turn = turns(5, 30, 40)
    slot, _ = fill(ledger, memory, (*system, *first_turn, *second_turn))
    length = 0 if memory.is_recurrent else 5
    assert ledger.apply_overflow(slot, [*system, *second_turn], can_move=True) == length
    ledger.check()
    assert ledger.claim_slot_for((*system, *second_turn), can_move=True) is None  # the slot is busy
    ledger.release(slot)
    assert ledger.claim_slot_for((*system, *second_turn), can_move=True) == (0, length)


def test_cells_of_a_busy_slot_are_not_moved():
    memory = FakeContext(n_seq_max=2)
    ledger = Ledger(memory)
    system, first_turn, second_turn, third_turn = turns(5, 30, 40, 20)
    first, _ = fill(ledger, memory, (*system, *first_turn, *second_turn))
    second, _ = fill(ledger, memory, (*system, *first_turn, *second_turn, *third_turn))
    assert (
        ledger.apply_overflow(second, [*system, *second_turn, *third_turn], can_move=True) == 5
    )  # the cells of second_turn are shared with a busy slot
    ledger.check()
    assert ledger.tokens[first] == [*system, *first_turn, *second_turn]
    assert ledger.apply_overflow(first, [*system, *second_turn], can_move=True) == 45
    assert ledger.used_cells == memory.used
    ledger.check()


def test_cells_after_a_shared_prefix_can_be_moved():
    memory = FakeContext(n_seq_max=2)
    ledger = Ledger(memory)
    system, first_turn, second_turn, third_turn = turns(20, 30, 40, 20)
    fill(ledger, memory, tuple(system))
    second, shared = fill(ledger, memory, (*system, *first_turn, *second_turn))
    assert shared == 20
    assert (
        ledger.apply_overflow(second, [*system[:10], *second_turn, *third_turn], can_move=True)
        == 50
    )  # the gap ends in cells that are not shared
    assert ledger.used_cells == memory.used == 60
    ledger.check()


@pytest.mark.parametrize("seed", range(20))
def test_swapped_states_are_restored_and_share_cells_as_before(seed):
    rng = random.Random(seed)
    memory = FakeContext(n_ctx=400, n_seq_max=8)
    ledger = Ledger(memory)
    slots = [fill(ledger, memory, (1, 2, 3, 4))[0], *(ledger.claim_slot() for _ in range(5))]
    for _ in range(12):
        source, target = rng.sample(slots, 2)
        ledger.fork(source, target)
        tokens = rng.choices(range(3), k=rng.randrange(4))
        for token in tokens:
            memory.set_token(target, token)
        ledger.append(target, tokens)
    before, used = [tokens[:] for tokens in ledger.tokens], ledger.used_cells
    states = {
        slot: ledger.swap_out(slot)
        for slot in rng.sample([slot for slot in slots if ledger.tokens[slot]], 2)
    }
    ledger.check()
    for slot, state in reversed(states.items()):
        assert ledger.swap_in(slot, state)
        ledger.check()
    assert (ledger.tokens, ledger.used_cells, memory.used) == (before, used, used)
    ledger.compact()
    ledger.check()
    assert (ledger.tokens, memory.used) == (before, used)


@pytest.mark.parametrize("seed", range(20))
def test_the_radix_tree_finds_the_longest_prefix_in_any_slot(seed):
    rng = random.Random(seed)
    tree = RadixTree()
    texts: list[list[int]] = [[] for _ in range(6)]
    for _ in range(200):
        slot = rng.randrange(6)
        if rng.random() < 0.3:
            keep = rng.randrange(len(texts[slot]) + 1)
            del texts[slot][keep:]
            tree.truncate(slot, keep)
        else:
            texts[slot] += rng.choices(range(2), k=rng.randrange(1, 5))
            tree.extend(slot, texts[slot], "")
        prompt = rng.choice(texts)[: rng.randrange(20)] + rng.choices(range(2), k=rng.randrange(4))
        lengths = [common_prefix(text, prompt) for text in texts]
        length, holders = tree.match(prompt, "")
        assert length == max(lengths)
        assert holders == {slot for slot in range(6) if length and lengths[slot] == length}
        assert tree.match(prompt, "another") == (0, set())
