"""Slots whose state cannot be cut go back to checkpoints, within the budget of host memory."""

import random

import pytest

from llmcli.runtime.kv_cache.checkpoints import MAX_PER_SLOT, Checkpoint, Checkpoints
from llmcli.runtime.kv_cache.context_protocols import SwappedState
from llmcli.runtime.kv_cache.ledger import Ledger
from llmcli.runtime.kv_cache.offload import DecodeOffload, IdleOffload, PreemptionSwap
from llmcli.runtime.kv_cache.offload_store import OffloadStore
from tests.fixtures.fakes import FakeContext

KINDS = [{"is_recurrent": True, "can_shift": False}, {"n_swa": 4}]


def compute(ledger: Ledger, memory: FakeContext, slot: int, tokens: list[int]) -> None:
    for token in tokens:
        memory.set_token(slot, token)
    ledger.append(slot, tokens)


def answer(ledger: Ledger, memory: FakeContext, prompt: list[int], reply: list[int]) -> int:
    """Answer a prompt as the engine does, with a checkpoint before its last token. Return the
    number of prompt tokens that were computed.
    """
    claimed = ledger.claim_slot_for(prompt)
    assert claimed is not None
    slot, reused = claimed
    if reused < len(prompt) - 1:
        compute(ledger, memory, slot, prompt[reused:-1])
        ledger.take_checkpoint(slot)
    compute(ledger, memory, slot, [prompt[-1], *reply])
    ledger.check()
    ledger.release(slot)
    return len(prompt) - reused


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [1, 3])
def test_undo_edit_and_regenerate_compute_new_tokens_only(kind: dict[str, int], slots: int) -> None:
    memory = FakeContext(checkpoint_bytes=400, n_seq_max=slots, **kind)
    ledger = Ledger(memory)
    system, first, second = [1] * 20, [2] * 6, [3] * 5
    assert answer(ledger, memory, system, first) == 20
    turn = [*system, *first, 9, 8]
    assert answer(ledger, memory, turn, second) == 2
    assert answer(ledger, memory, turn, [5] * 9) == 1  # another answer to the same prompt
    edited = [*system, *first, 7, 7, 7]
    assert answer(ledger, memory, edited, second) == 3
    assert answer(ledger, memory, system, [6]) == 1  # all turns undone
    assert ledger.used_cells == memory.used


@pytest.mark.parametrize("kind", KINDS)
def test_without_checkpoints_the_prompt_is_computed_again(kind: dict[str, int]) -> None:
    memory = FakeContext(checkpoint_bytes=400, **kind)
    ledger = Ledger(memory)
    ledger.before_checkpoint = lambda nbytes: False
    answer(ledger, memory, [1] * 20, [2] * 6)
    assert answer(ledger, memory, [1] * 20, [2] * 6) == 20
    assert len(ledger.checkpoints) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_branches_keep_their_cells_and_share_a_checkpoint(kind: dict[str, int]) -> None:
    memory = FakeContext(checkpoint_bytes=400, n_seq_max=3, **kind)
    ledger = Ledger(memory)
    system = [1] * 20
    answer(ledger, memory, system, [2] * 6)
    answer(ledger, memory, [*system[:-1], 4], [3] * 5)
    assert sorted(len(tokens) for tokens in ledger.tokens) == [0, 25, 26]
    assert len(ledger.checkpoints) == 1
    assert answer(ledger, memory, [*system, *[2] * 6, 5], [3]) == 1
    assert answer(ledger, memory, [*system[:-1], 4, *[3] * 5, 5], [3]) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(10))
def test_any_mix_of_prompts_agrees_with_the_memory(kind: dict[str, int], seed: int) -> None:
    rng = random.Random(seed)
    memory = FakeContext(n_ctx=200, n_seq_max=3, checkpoint_bytes=300, **kind)
    ledger = Ledger(memory)
    store = OffloadStore(ledger)
    idle, swap = IdleOffload(store), PreemptionSwap(store)
    store.set_budget(rng.choice([0, 2000, 100_000]))
    texts: list[list[int]] = [[1, 2, 3]]
    preempted: list[SwappedState] = []
    for _ in range(60):
        text = rng.choice(texts)
        prompt = [*text[: rng.randint(1, len(text))], *rng.choices(range(4), k=rng.randint(1, 9))]
        idle.restore_prefix(prompt, "")
        if ledger.make_room(len(prompt) + 5):
            reply = rng.choices(range(4), k=rng.randint(1, 5))
            answer(ledger, memory, prompt, reply)
            texts.append([*prompt, *reply])
        if rng.random() < 0.2 and (claimed := ledger.claim_slot_for([*rng.choice(texts), 3])):
            if swapped := swap.swap_out(claimed[0]):
                preempted.append(swapped)
            ledger.trim(claimed[0], 0)
            ledger.release(claimed[0])
        elif preempted and rng.random() < 0.4:
            slot, swapped = ledger.claim_slot(), preempted.pop(rng.randrange(len(preempted)))
            assert swap.swap_in(slot, swapped)
            assert ledger.tokens[slot] == list(swapped.tokens)
            ledger.release(slot)
        ledger.check()
        assert store.nbytes <= store.max_bytes
        states = [*preempted, *(state.swapped for state in store.idle.values())]
        of_slots = [ledger.checkpoints.of_slot(slot) for slot in range(3)]
        held = {found for group in of_slots for found in group} | {
            found for state in states for found in state.checkpoints
        }
        assert ledger.checkpoints.nbytes == sum(len(found.state) for found in held)
        assert store.nbytes == ledger.checkpoints.nbytes + sum(len(one.state) for one in states)
        for slot, group in enumerate(of_slots):
            lengths = [found.length for found in group]
            assert lengths == sorted(set(lengths))
            assert not lengths or lengths[-1] <= len(ledger.tokens[slot])


def test_an_idle_state_is_restored_up_to_a_checkpoint() -> None:
    memory = FakeContext(n_ctx=64, n_seq_max=1, is_recurrent=True, checkpoint_bytes=100)
    ledger = Ledger(memory)
    store = OffloadStore(ledger)
    idle = IdleOffload(store)
    store.set_budget(1 << 20)
    prompt = [1] * 20
    answer(ledger, memory, prompt, [2] * 6)
    answer(ledger, memory, [3] * 30, [2])
    assert len(store.idle) == 1
    idle.restore_prefix(prompt, "")
    assert answer(ledger, memory, prompt, [5]) == 1


def test_checkpoints_take_half_of_the_budget_and_the_oldest_go_first() -> None:
    memory = FakeContext(n_seq_max=2, is_recurrent=True, checkpoint_bytes=100)
    ledger = Ledger(memory)
    store = OffloadStore(ledger)
    store.set_budget(700)
    for start in (1, 2):
        text = [start] * 4
        for _ in range(3):
            answer(ledger, memory, text, [7, 7])
            text = [*text, 7, 7, 9]
    assert ledger.checkpoints.nbytes == 300
    assert ledger.checkpoints.of_slot(0) == ()
    store.set_budget(100)
    assert ledger.checkpoints.nbytes == 100


def test_a_slot_keeps_its_first_and_last_checkpoints() -> None:
    checkpoints = Checkpoints(1)
    lengths = [*range(10, 10 * MAX_PER_SLOT + 30, 10)]
    for length in lengths:
        checkpoints.add(0, Checkpoint(length, memoryview(b"x")))
    kept = [checkpoint.length for checkpoint in checkpoints.of_slot(0)]
    assert len(kept) == MAX_PER_SLOT == checkpoints.nbytes
    assert (kept[0], kept[-1]) == (lengths[0], lengths[-1])
    assert kept == sorted(kept)


def store_of(ledger: Ledger, max_bytes: int, token_bytes: float = 0.0) -> OffloadStore:
    """Return a store with idle offload for a ledger."""
    store = OffloadStore(ledger, token_bytes)
    IdleOffload(store)
    store.set_budget(max_bytes)
    return store


def test_idle_states_make_room_for_checkpoints_before_slots_lose_theirs() -> None:
    memory = FakeContext(n_seq_max=1, is_recurrent=True, checkpoint_bytes=100)
    ledger = Ledger(memory)
    store = store_of(ledger, 1400)
    for start in (1, 2, 3):
        text = [start] * 4
        for _ in range(3):
            answer(ledger, memory, text, [7, 7])
            text = [*text, 7, 7, 9]
    # three in the slot, three in an idle state; the first state made room
    assert [state.swapped.tokens[0] for state in store.idle.values()] == [2]
    assert len(ledger.checkpoints.of_slot(0)) == 3
    assert ledger.checkpoints.nbytes == 600
    answer(ledger, memory, [*text[:-1], 5, 5], [7])
    answer(ledger, memory, [*text[:-1], 5, 5, 7, 5], [7])
    assert store.idle == {}
    assert len(ledger.checkpoints.of_slot(0)) == 6


def test_checkpoints_of_pinned_states_are_never_dropped_and_count() -> None:
    memory = FakeContext(n_seq_max=2, is_recurrent=True, checkpoint_bytes=100)
    ledger = Ledger(memory)
    store = store_of(ledger, 1000)
    swap = PreemptionSwap(store)
    text = [1] * 4
    for _ in range(4):
        answer(ledger, memory, text, [7, 7])
        text = [*text, 7, 7, 9]
    kept = swap.swap_out(0)
    assert kept
    assert len(kept.checkpoints) == 4
    other = [2] * 4
    for _ in range(3):
        answer(ledger, memory, other, [7, 7])
        other = [*other, 7, 7, 9]
    # five fit into half of the budget
    assert sum(len(ledger.checkpoints.of_slot(slot)) for slot in (0, 1)) == 1
    assert not store.make_room(1000 - len(kept.state) - 400 + 1)
    assert store.nbytes == len(kept.state) + 500
    assert store.make_room(1000 - len(kept.state) - 400)
    assert store.nbytes == len(kept.state) + 400


@pytest.mark.parametrize(("budget", "is_stored"), [(500, True), (400, False)])
def test_the_checkpoints_of_a_preempted_answer_count_in_its_size(
    budget: int, is_stored: bool
) -> None:
    memory = FakeContext(
        n_seq_max=2, is_recurrent=True, checkpoint_bytes=100, token_bytes=30, word=b"s"
    )
    ledger = Ledger(memory)
    store = store_of(ledger, 100_000, token_bytes=1)
    text = [1] * 4
    for _ in range(2):
        answer(ledger, memory, text, [7, 7])
        text = [*text, 7, 7, 9]
    store.set_budget(budget)
    assert ledger.checkpoints.nbytes == 200
    state_bytes = 30 * len(ledger.tokens[0])
    assert 400 - 200 < state_bytes <= 500 - 200
    swapped = PreemptionSwap(store).swap_out(0)
    assert (swapped is not None) == is_stored
    assert store.nbytes == (state_bytes + 200 if is_stored else 0)


def test_running_answers_that_are_larger_than_estimated_stay_in_the_pool() -> None:
    memory = FakeContext(n_seq_max=2, is_recurrent=True, checkpoint_bytes=100, token_bytes=30)
    ledger = Ledger(memory)
    store = store_of(ledger, 1000, token_bytes=1)
    slot = ledger.claim_slot()
    compute(ledger, memory, slot, [1] * 40)
    with DecodeOffload(store).offload_slots([slot]):
        assert len(ledger.tokens[slot]) == 40
        assert store.nbytes == 0
    store.set_budget(1200)
    with DecodeOffload(store).offload_slots([slot]):
        assert ledger.tokens[slot] == []
        assert store.nbytes == 1200
    assert len(ledger.tokens[slot]) == 40
    ledger.check()


def test_a_restored_state_with_checkpoints_stays_within_the_budget() -> None:
    """The cells of another slot are stored while the state is restored."""
    memory = FakeContext(n_seq_max=1, is_recurrent=True, checkpoint_bytes=100, token_bytes=10)
    ledger = Ledger(memory)
    store = OffloadStore(ledger)
    idle = IdleOffload(store)
    store.set_budget(10_000)
    first, second = [1] * 4, [2] * 4
    for _ in range(3):
        answer(ledger, memory, first, [7, 7])
        first = [*first, 7, 7, 9]
    answer(ledger, memory, second, [7] * 40)
    store.set_budget(store.nbytes)
    idle.restore_prefix(first, "")
    assert ledger.tokens[0] == first[:-1]
    assert store.nbytes <= store.max_bytes


def test_a_copied_checkpoint_is_kept_while_the_slot_for_it_is_emptied() -> None:
    memory = FakeContext(n_seq_max=2, is_recurrent=True, checkpoint_bytes=100, token_bytes=30)
    ledger = Ledger(memory)
    store = store_of(ledger, 700, token_bytes=30)
    prompt = [1] * 5
    answer(ledger, memory, prompt, [2, 2, 2])
    answer(ledger, memory, [3] * 20, [4])
    assert [len(ledger.checkpoints.of_slot(slot)) for slot in (0, 1)] == [1, 1]
    # the other slot is emptied for the prompt, and its state needs all of the budget
    ledger._slots.last_used = [2, 1]
    assert answer(ledger, memory, prompt, [5]) == 1
    assert not store.idle
    assert store.nbytes <= store.max_bytes


def test_a_checkpoint_is_kept_while_the_end_of_its_slot_is_stored() -> None:
    memory = FakeContext(n_seq_max=1, is_recurrent=True, checkpoint_bytes=100, token_bytes=30)
    ledger = Ledger(memory)
    store_of(ledger, 330, token_bytes=30)
    prompt = [1] * 5
    answer(ledger, memory, prompt, [2] * 5)
    assert answer(ledger, memory, prompt, [3]) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_without_memory_for_a_checkpoint_the_answer_goes_on(kind: dict[str, int]) -> None:
    class FullMemory(FakeContext):
        def read_checkpoint(self, sequence: int) -> memoryview:
            raise MemoryError

    memory = FullMemory(n_seq_max=2, **kind)
    ledger = Ledger(memory)
    store = store_of(ledger, 1000)
    answer(ledger, memory, [1] * 20, [2] * 6)
    assert store.max_bytes == 0
    assert len(ledger.checkpoints) == 0
    assert answer(ledger, memory, [1] * 20, [2] * 6) == 20


def test_room_is_made_for_the_size_of_the_checkpoint_itself() -> None:
    memory = FakeContext(is_recurrent=True, checkpoint_bytes=100)
    ledger = Ledger(memory)
    asked: list[int] = []
    ledger.before_checkpoint = lambda nbytes: not asked.append(nbytes)
    answer(ledger, memory, [1] * 20, [2])
    answer(ledger, memory, [3] * 80, [2])
    (checkpoint,) = ledger.checkpoints.of_slot(0)
    assert asked == [100, len(checkpoint.state)]
    assert len(checkpoint.state) > 100


def test_the_idle_state_with_the_most_usable_tokens_is_restored() -> None:
    """The longest common prefix may be usable only up to an early checkpoint."""
    memory = FakeContext(n_seq_max=1, is_recurrent=True, checkpoint_bytes=10)
    ledger = Ledger(memory)
    store = OffloadStore(ledger)
    idle = IdleOffload(store)
    store.set_budget(1 << 20)
    text = list(range(100))
    answer(ledger, memory, text[:11], [*text[11:100], 255])
    answer(ledger, memory, text[:90], [200])
    answer(ledger, memory, [250] * 9, [2])
    assert len(store.idle) == 2
    found = store.find_idle([*text, 254], "", 0, needs_whole=True)
    assert found is not None
    assert store.idle[found].swapped.tokens == (*text[:90], 200)
    idle.restore_prefix([*text, 254, 254], "")
    assert len(store.idle) == 2  # with the state that was in the slot
    assert len(ledger.tokens[0]) == 91
