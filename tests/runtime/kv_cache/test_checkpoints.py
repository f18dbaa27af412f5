"""Slots whose state cannot be cut go back to checkpoints, within the budget of host memory."""

import random

import pytest

from llmcli.runtime.kv_cache.checkpoints import MAX_PER_SLOT, Checkpoint, Checkpoints
from llmcli.runtime.kv_cache.common_prefix import common_prefix
from llmcli.runtime.kv_cache.ledger import Ledger
from llmcli.runtime.kv_cache.offload import IdleOffload
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
    idle = IdleOffload(store)
    store.set_budget(rng.choice([0, 2000, 100_000]))
    texts: list[list[int]] = [[1, 2, 3]]
    for _ in range(60):
        text = rng.choice(texts)
        prompt = [*text[: rng.randint(1, len(text))], *rng.choices(range(4), k=rng.randint(1, 9))]
        idle.restore_prefix(prompt, "")
        if ledger.make_room(len(prompt) + 5):
            reply = rng.choices(range(4), k=rng.randint(1, 5))
            answer(ledger, memory, prompt, reply)
            texts.append([*prompt, *reply])
        ledger.check()
        assert store.nbytes <= max(store.max_bytes, 0)
        held = {
            checkpoint for slot in range(3) for checkpoint in ledger.checkpoints.of_slot(slot)
        } | {
            checkpoint for state in store.idle.values() for checkpoint in state.swapped.checkpoints
        }
        assert ledger.checkpoints.nbytes == sum(len(checkpoint.state) for checkpoint in held)
        for slot in range(3):
            for checkpoint in ledger.checkpoints.of_slot(slot):
                assert checkpoint.length <= len(ledger.tokens[slot])


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
    assert common_prefix(kept, sorted(kept)) == len(kept)
