"""Finds the rows of a pass whose tokens a text has kept."""

from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.requests.sequence import Sequence


def find_text_rows(rows: BatchRows, sequence: Sequence) -> list[int]:
    """Return the numbers of the rows of a pass, in order of their positions, that belong to a
    sequence and have the tokens of its text. If the rows are those of a tree of tokens, they are on
    one path.
    """
    text, found = sequence.tokens, list[int]()
    branches: set[int] | None = None
    for row, (position, slot, token) in enumerate(
        zip(rows.positions, rows.sequences, rows.tokens, strict=True)
    ):
        if slot != sequence.slot or position >= len(text) or text[position] != token:
            continue
        if found and position != rows.positions[found[-1]] + 1:
            continue
        if rows.branches:
            shared = set(rows.branches[row]) & (branches or set(rows.branches[row]))
            if not shared:
                continue
            branches = shared
        found.append(row)
    return found
