"""The cache by whose cells they are: the system text's, each turn's, other sequences', free.

Turns are told from the conversation's text as its template writes it, so a turn's edge may be a
token off where the model spelled an answer otherwise than the tokenizer would; the sum is exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from llmcli.chat.chat_session import Talk
from llmcli.chat.display.styles import bar

TOLD = 9  # turns told one by one, the last ones
GONE = "not sent again"  # what has left stays in the cache up to the next answer
SHARED, FREE = "=", "."


@dataclass(frozen=True, slots=True)
class Part:
    """Cells of one owner; `shared` of them are held by other sequences as well and count once."""

    name: str
    mark: str
    cells: int
    shared: int = 0


def parts(talk: Talk) -> list[Part]:
    """Every cell of the pool, in order of age; what is free is the last part."""
    occupied, tree = talk.runner.engine.ledger.occupied(), talk.session.tree
    latest, ends = occupied.latest, talk.ends()
    kept = tree.kept()[: len(ends)] or tree.kept()[-1:] or [1]
    names = [("system", "S"), *((f"turn {n}", str(n % 10)) for n in kept)]
    if tree.left.isdisjoint(tree.path()):
        del ends[-1:]  # what is left over is the last turn's
    else:
        names.append((GONE, "x"))
        ends = ends or [talk.prefix()]
    edges = [min(edge, len(latest)) for edge in (0, talk.prefix(), *ends)] + [len(latest)]
    if len(names) > TOLD + 1:
        many = len(names) - 1 - TOLD
        names[1 : many + 1] = [(f"turns {kept[0]}-{kept[many - 1]}", "t")]
        del edges[2 : many + 1]
    spans = [max(0, end - start) for start, end in pairwise(edges)]
    found = [
        Part(name, mark, cells, sum(latest[end - cells : end]))
        for (name, mark), cells, end in zip(names, spans, edges[1:], strict=True)
    ]
    others = [Part("other sequences", "o", occupied.others)] if occupied.others else []
    return [*(part for part in found if part.cells), *others, Part("free", FREE, occupied.free)]


def picture(cells: Sequence[Part], width: int = 40) -> str:
    """A bar of the whole pool: `=` where a part's cells are shared, each part at least one column."""
    pieces = []
    for part in cells:
        if part.mark != FREE:
            pieces += [(SHARED, part.shared), (part.mark, part.cells - part.shared)]
    drawn = bar(pieces, sum(part.cells for part in cells), width)
    return f"[{drawn.ljust(width, FREE)}]"
