"""Operations of fuzz/context.py that save and restore sequence states.

A complete state fits any sequence with enough cells. A truncated state, or bytes that are no state,
leave an empty sequence.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # context.py imports this module
    from scripts.fuzz.context import Fuzz


def swap(fuzz: "Fuzz") -> None:
    """Replace one sequence by another's state, or by an invalid one."""
    source, target = (fuzz.rng.randrange(fuzz.context.n_seq_max) for _ in range(2))
    if fuzz.rng.random() < 0.2:
        wrong = fuzz.rng.choice((-1, fuzz.context.n_seq_max, 256))
        fuzz._refused(
            lambda: (
                fuzz.context.write_state(wrong, b"")
                if fuzz.rng.random() < 0.5
                else fuzz.context.read_state(wrong)
            )
        )
        return
    tokens, state = fuzz.reference.held(source), bytes(fuzz.context.read_state(source))
    if fuzz.rng.random() < 0.3:
        broken = (state[: fuzz.rng.randrange(1, len(state))], b"x" + state[1:], state + state[:1])
        assert not fuzz.context.write_state(target, fuzz.rng.choice(broken))
        fuzz.reference.trim(target, 0)
    else:
        _put(fuzz, source, target, tokens, state)
    fuzz._legal()


def adopt(fuzz: "Fuzz") -> None:
    """Let the ledger find cells for a saved sequence."""
    slot = fuzz.rng.randrange(fuzz.context.n_seq_max)
    tokens, state = list(fuzz.ledger.tokens[slot]), bytes(fuzz.context.read_state(slot))
    if tokens:
        before = [cell for cell in fuzz.reference.cells if slot in cell.owners]
        pure = all(cell.pure for cell in before)
        fuzz.ledger.restore_state(
            tokens, lambda target: _put(fuzz, slot, target, tokens, state, pure), turn=0
        )
        fuzz._legal()


def _put(
    fuzz: "Fuzz",
    source: int,
    target: int,
    tokens: list[int],
    state: bytes,
    pure: bool | None = None,
) -> bool:
    """Write a state to the context and the reference; return whether the reference has cells for
    it.
    """
    reference = fuzz.reference
    marks = [
        cell.pure
        for cell in sorted(reference.cells, key=lambda cell: cell.position)
        if source in cell.owners
    ]
    reference.trim(target, 0)
    good = fuzz.context.write_state(target, state)
    used = 0 if reference.streams else len(reference.cells)
    assert good == (used + len(tokens) <= reference.size), (good, used, len(tokens))
    if good:
        reference.fill(target, tokens, marks if pure is None else [pure] * len(tokens))
    return good
