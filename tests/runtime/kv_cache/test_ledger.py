"""The ledger's map of cells agrees with the cache after any operation."""

import random

import pytest

from llmcli.runtime.kv_cache.common_prefix import common_prefix
from llmcli.runtime.kv_cache.ledger import Ledger
from llmcli.runtime.kv_cache.radix_tree import RadixTree
from tests.fixtures.fakes import FakeContext


def fill(ledger: Ledger, memory: FakeContext, tokens: tuple[int, ...]) -> tuple[int, int]:
    """Place a prompt and compute what is missing, as the engine does."""
    placed = ledger.claim_slot_for(tokens)
    assert placed is not None
    slot, reused = placed
    rest = list(tokens[reused:])
    for token in rest:
        memory.set_token(slot, token)
    ledger.append(slot, rest)
    return slot, reused


def test_the_next_turn_finds_its_prefix():
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


def test_a_prefix_that_another_sequence_is_using_is_shared_and_counted_once():
    memory = FakeContext(n_seq_max=2)
    ledger = Ledger(memory)
    fill(ledger, memory, (1, 2, 3, 4))
    assert fill(ledger, memory, (1, 2, 3, 9)) == (1, 3)
    assert ledger.used_cells == memory.used == 5
    ledger.check()


def test_a_window_that_has_moved_on_is_computed_again():
    memory = FakeContext(n_swa=4)
    ledger = Ledger(memory)
    ledger.release(fill(ledger, memory, tuple(range(10)))[0])
    assert ledger.claim_slot_for((0, 1, 2, 3, 99)) == (0, 0)


def test_an_interrupted_pass_that_moved_the_window_on_leaves_nothing_to_reuse():
    memory = FakeContext(n_swa=4)
    ledger = Ledger(memory)
    slot, _ = fill(ledger, memory, tuple(range(10)))
    for token in range(6):  # what the pass had computed when it was interrupted
        memory.set_token(slot, token)
    ledger.restore(slot)
    ledger.release(slot)
    ledger.check()
    assert ledger.claim_slot_for((*range(10), 99)) == (slot, 0)


def test_recurrent_state_is_reused_only_whole():
    memory = FakeContext(is_recurrent=True)
    ledger = Ledger(memory)
    ledger.release(fill(ledger, memory, (1, 2, 3))[0])
    assert ledger.claim_slot_for((1, 2, 3, 4)) == (0, 3)
    ledger.release(0)
    assert ledger.claim_slot_for((1, 2, 9)) == (0, 0)


def test_room_is_made_by_forgetting_the_longest_unused():
    memory = FakeContext(n_ctx=8, n_seq_max=3)
    ledger = Ledger(memory)
    slots = [fill(ledger, memory, (n, n, n))[0] for n in (1, 2)]
    for slot in slots:
        ledger.release(slot)
    assert ledger.make_room(4)
    assert [len(held) for held in ledger.tokens] == [0, 3, 0]
    ledger.check()


def test_there_is_no_place_while_every_slot_is_busy():
    memory = FakeContext()
    ledger = Ledger(memory)
    fill(ledger, memory, (1, 2))
    assert ledger.claim_slot_for((3, 4)) is None


@pytest.mark.parametrize("seed", range(30))
def test_any_mix_of_requests_leaves_map_and_memory_in_agreement(seed):
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
def test_any_mix_of_forks_leaves_map_and_memory_in_agreement_and_stores_a_tree_once(seed):
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
    wanted = [*ledger.tokens[slots[2]], 7]
    kept = ledger.keep_best_branch(slots, wanted)
    ledger.check()
    assert ledger.tokens[kept] == wanted[:-1]
    assert ledger.used_cells == memory.used == len(wanted) - 1
    assert ledger.n_idle == 5


def test_a_conversation_that_goes_on_keeps_no_second_copy_of_itself():
    memory = FakeContext(n_seq_max=4)
    ledger = Ledger(memory)
    slot, _ = fill(ledger, memory, (1, 2, 3))
    ledger.release(slot, turn=1)
    # The template spells the answer otherwise than it was said: what was said is of no use any
    # more.
    assert ledger.claim_slot_for((1, 2, 9, 9), earlier_turns=frozenset({1})) == (slot, 2)


def test_a_branch_keeps_what_the_conversation_held_and_the_oldest_gives_way_to_a_new_one():
    memory = FakeContext(n_seq_max=3)
    ledger = Ledger(memory)
    for turn, last in enumerate((3, 4, 5), 1):
        slot, reused = fill(ledger, memory, (1, 2, last, last))
        assert reused == (2 if turn > 1 else 0)
        ledger.release(slot, turn)
    assert ledger.used_cells == 2 + 3 * 2
    slot, reused = fill(ledger, memory, (1, 2, 6, 6))
    assert (slot, reused) == (0, 2)  # in place of the first
    ledger.release(slot, 4)
    assert [held[2] for held in ledger.tokens] == [6, 4, 5]
    assert ledger.find_nearest((1, 2, 4, 4, 9)) == (1, 4)


def turns(*sizes: int) -> list[list[int]]:
    """Texts without a token in common."""
    return [list(range(100 * number, 100 * number + size)) for number, size in enumerate(sizes, 1)]


def test_what_stands_behind_a_turn_that_left_moves_up():
    memory = FakeContext()
    ledger = Ledger(memory)
    system, one, two, three = turns(5, 30, 40, 20)
    slot, _ = fill(ledger, memory, (*system, *one, *two))
    assert ledger.apply_overflow(slot, [*system, *two, *three], can_move=True) == 45
    assert ledger.tokens[slot] == [*system, *two]
    assert ledger.used_cells == memory.used == 45
    ledger.check()


def test_a_prompt_may_leave_out_several_pieces():
    memory = FakeContext()
    ledger = Ledger(memory)
    system, one, two, three, four = turns(5, 30, 40, 20, 25)
    ledger.release(fill(ledger, memory, (*system, *one, *two, *three, *four))[0])
    assert ledger.claim_slot_for((*system, *two, *four, 7, 8), can_move=True) == (0, 70)
    ledger.check()


@pytest.mark.parametrize("can", [{"can_shift": False}, {"is_recurrent": True, "can_shift": False}])
def test_where_cells_cannot_move_they_are_computed_anew(can: dict[str, bool]):
    memory = FakeContext(**can)
    ledger = Ledger(memory)
    system, one, two = turns(5, 30, 40)
    slot, _ = fill(ledger, memory, (*system, *one, *two))
    kept = 0 if memory.is_recurrent else 5
    assert ledger.apply_overflow(slot, [*system, *two], can_move=True) == kept
    ledger.check()
    assert ledger.claim_slot_for((*system, *two), can_move=True) is None  # the slot is busy
    ledger.release(slot)
    assert ledger.claim_slot_for((*system, *two), can_move=True) == (0, kept)


def test_cells_that_another_slot_holds_are_not_moved():
    memory = FakeContext(n_seq_max=2)
    ledger = Ledger(memory)
    system, one, two, three = turns(5, 30, 40, 20)
    first, _ = fill(ledger, memory, (*system, *one, *two))
    second, _ = fill(ledger, memory, (*system, *one, *two, *three))
    assert (
        ledger.apply_overflow(second, [*system, *two, *three], can_move=True) == 5
    )  # two is shared
    ledger.check()
    assert ledger.tokens[first] == [*system, *one, *two]
    assert ledger.apply_overflow(first, [*system, *two], can_move=True) == 45
    assert ledger.used_cells == memory.used
    ledger.check()


def test_a_shared_beginning_does_not_keep_the_rest_from_moving():
    memory = FakeContext(n_seq_max=2)
    ledger = Ledger(memory)
    system, one, two, three = turns(20, 30, 40, 20)
    fill(ledger, memory, tuple(system))
    second, shared = fill(ledger, memory, (*system, *one, *two))
    assert shared == 20
    assert (
        ledger.apply_overflow(second, [*system[:10], *two, *three], can_move=True) == 50
    )  # the gap ends in cells of its own
    assert ledger.used_cells == memory.used == 60
    ledger.check()


@pytest.mark.parametrize("seed", range(20))
def test_what_is_taken_out_comes_back_and_what_others_hold_stays_shared(seed):
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
    before, used = [held[:] for held in ledger.tokens], ledger.used_cells
    away = {
        slot: ledger.swap_out(slot)
        for slot in rng.sample([slot for slot in slots if ledger.tokens[slot]], 2)
    }
    ledger.check()
    for slot, kept in reversed(away.items()):
        assert ledger.swap_in(slot, kept)
        ledger.check()
    assert (ledger.tokens, ledger.used_cells, memory.used) == (before, used, used)
    ledger.compact()
    ledger.check()
    assert (ledger.tokens, memory.used) == (before, used)


@pytest.mark.parametrize("seed", range(20))
def test_the_tree_finds_the_longest_prefix_that_any_slot_holds(seed):
    rng = random.Random(seed)
    tree = RadixTree(6)
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
        wanted = rng.choice(texts)[: rng.randrange(20)] + rng.choices(range(2), k=rng.randrange(4))
        lengths = [common_prefix(text, wanted) for text in texts]
        length, holders = tree.match(wanted, "")
        assert length == max(lengths)
        assert holders == {slot for slot in range(6) if length and lengths[slot] == length}
        assert tree.match(wanted, "another") == (0, set())
