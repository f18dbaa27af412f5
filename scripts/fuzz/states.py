"""Operations of fuzz/context.py that save and restore the state of a sequence (llama_state_seq_*).

A complete state can be restored to any sequence if there are enough cells. Restoring a truncated
state, or bytes that are no state, must fail and leave an empty sequence.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # context.py imports this module
    from scripts.fuzz.context import Fuzz


def swap(fuzz: "Fuzz") -> None:
    """Restore the state of one sequence to another, or try an invalid state or sequence."""
    source, target = (fuzz.rng.randrange(fuzz.context.n_seq_max) for _ in range(2))
    if fuzz.rng.random() < 0.2:
        invalid = fuzz.rng.choice((-1, fuzz.context.n_seq_max, 256))
        fuzz._expect_refusal(
            lambda: (
                fuzz.context.write_state(invalid, b"")
                if fuzz.rng.random() < 0.5
                else fuzz.context.read_state(invalid)
            )
        )
        return
    tokens, state = fuzz.reference.tokens_of(source), bytes(fuzz.context.read_state(source))
    if fuzz.rng.random() < 0.3:
        broken_states = (
            state[: fuzz.rng.randrange(1, len(state))],
            b"x" + state[1:],
            state + state[:1],
        )
        assert not fuzz.context.write_state(target, fuzz.rng.choice(broken_states))
        fuzz.reference.trim(target, 0)
    else:
        _restore(fuzz, source, target, tokens, state)
    fuzz._count_legal()


def adopt(fuzz: "Fuzz") -> None:
    """Save the state of a slot, and let the ledger restore it to a slot that it chooses."""
    slot = fuzz.rng.randrange(fuzz.context.n_seq_max)
    tokens, state = list(fuzz.ledger.tokens[slot]), bytes(fuzz.context.read_state(slot))
    if tokens:
        before = [cell for cell in fuzz.reference.cells if slot in cell.owners]
        pure = all(cell.pure for cell in before)
        fuzz.ledger.restore_state(
            tokens, lambda target: _restore(fuzz, slot, target, tokens, state, pure), turn=0
        )
        fuzz._count_legal()


def _restore(
    fuzz: "Fuzz",
    source: int,
    target: int,
    tokens: list[int],
    state: bytes,
    pure: bool | None = None,
) -> bool:
    """Restore the state of sequence `source` to `target`, in the context and in the reference.
    Return whether there were enough cells for it; the two must agree.

    `pure`: the flag of all restored cells; None: the flags of the source's cells.
    """
    reference = fuzz.reference
    pure_flags = [
        cell.pure
        for cell in sorted(reference.cells, key=lambda cell: cell.position)
        if source in cell.owners
    ]
    reference.trim(target, 0)
    restored = fuzz.context.write_state(target, state)
    used = 0 if reference.streams else len(reference.cells)
    assert restored == (used + len(tokens) <= reference.size), (restored, used, len(tokens))
    if restored:
        reference.fill(target, tokens, pure_flags if pure is None else [pure] * len(tokens))
    return restored
