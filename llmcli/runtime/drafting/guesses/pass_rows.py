"""Finds the rows of a pass whose tokens a text has kept."""

from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.requests.sequence import Sequence


def find_text_rows(rows: BatchRows, sequence: Sequence) -> list[int]:
    """Return the numbers of the rows of a pass, in order of their positions, that belong to a
    sequence and have the tokens of its text, up to the first position without one. If the rows are
    those of a tree of tokens, they are on one path.
    """
    text, found = sequence.tokens, list[int]()
    position = next(
        (rows.positions[row] for row, slot in enumerate(rows.sequences) if slot == sequence.slot), 0
    )
    branches: set[int] | None = None
    for row, token in enumerate(rows.tokens):
        if rows.sequences[row] != sequence.slot or rows.positions[row] != position:
            continue
        if position >= len(text) or text[position] != token:
            continue
        if rows.branches:
            shared = set(rows.branches[row]) & (branches or set(rows.branches[row]))
            if not shared:
                continue
            branches = shared
        found.append(row)
        position += 1
    return found
