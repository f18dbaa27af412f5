"""The KV cache by owner: system text, each turn, other sequences, free cells.

The end of each turn is computed from the conversation as the template renders it. It may be off by
a token if the model generated an answer with other tokens than the tokenizer would choose; the sum
of all cells is exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.display.styles import draw_bar

MAX_SHOWN_TURNS = 9  # the number of last turns listed separately
DROPPED_LABEL = "not sent again"  # turns that were dropped stay in the cache until the next answer
SHARED_MARK, FREE_MARK = "=", "."


@dataclass(frozen=True, slots=True)
class CacheSegment:
    """The cells of one owner. `shared` of the `cells` are also used by other sequences.

    A shared cell is counted once.
    """

    name: str
    mark: str
    cells: int
    shared: int = 0


def cache_segments(chat: ChatSession) -> list[CacheSegment]:
    """Return the segments of the whole cache, oldest first; the last segment is the free cells."""
    occupied, tree = chat.runner.engine.ledger.cell_owners(), chat.conversation.tree
    latest, ends = occupied.latest_is_shared, chat.turn_ends()
    turns = tree.sent_turns()[: len(ends)] or tree.sent_turns()[-1:] or [1]
    names = [("system", "S"), *((f"turn {n}", str(n % 10)) for n in turns)]
    if tree.dropped.isdisjoint(tree.current_path()):
        del ends[-1:]  # the remaining cells belong to the last turn
    else:
        names.append((DROPPED_LABEL, "x"))
        ends = ends or [chat.prefix_token_count()]
    edges = [min(edge, len(latest)) for edge in (0, chat.prefix_token_count(), *ends)] + [
        len(latest)
    ]
    if len(names) > MAX_SHOWN_TURNS + 1:
        n_joined = len(names) - 1 - MAX_SHOWN_TURNS
        names[1 : n_joined + 1] = [(f"turns {turns[0]}-{turns[n_joined - 1]}", "t")]
        del edges[2 : n_joined + 1]
    spans = [max(0, end - start) for start, end in pairwise(edges)]
    segments = [
        CacheSegment(name, mark, cells, sum(latest[end - cells : end]))
        for (name, mark), cells, end in zip(names, spans, edges[1:], strict=True)
    ]
    other_sequences = (
        [CacheSegment("other sequences", "o", occupied.other_cells)] if occupied.other_cells else []
    )
    return [
        *(segment for segment in segments if segment.cells),
        *other_sequences,
        CacheSegment("free", FREE_MARK, occupied.free_cells),
    ]


def draw_cache(segments: Sequence[CacheSegment], width: int = 40) -> str:
    """Draw the cache as a bar, with `=` for shared cells; each segment gets at least one column."""
    pieces = []
    for part in segments:
        if part.mark != FREE_MARK:
            pieces += [(SHARED_MARK, part.shared), (part.mark, part.cells - part.shared)]
    drawn = draw_bar(pieces, sum(part.cells for part in segments), width)
    return f"[{drawn.ljust(width, FREE_MARK)}]"
