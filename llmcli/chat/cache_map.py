"""Shows for what the cells of the KV cache are used: the system text, each turn of the
conversation, other sequences, or nothing.

Where a turn ends in the cache is computed by tokenizing the conversation. The result can be wrong
by a token, because a model can generate a text with other tokens than the tokenizer chooses for it.
The sum of all cells is exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.display.styles import draw_bar

MAX_SHOWN_TURNS = 9  # number of last turns that are listed separately
DROPPED_LABEL = "not sent again"  # dropped turns, which stay in the cache until the next answer
SHARED_MARK, FREE_MARK = "=", "."


@dataclass(frozen=True, slots=True)
class CacheSegment:
    """A number of KV cache cells that are used for the same purpose, such as one turn.

    `name`: the purpose. `mark`: the character that stands for it in a bar. `cells`: number of
    cells. `shared`: how many of these cells also belong to other sequences of the engine.
    """

    name: str
    mark: str
    cells: int
    shared: int = 0


def cache_segments(chat: ChatSession) -> list[CacheSegment]:
    """Return all cells of the KV cache as segments: system text, turns from the oldest to the
    newest, other sequences, free cells. If there are more than MAX_SHOWN_TURNS turns, the oldest
    are one segment.
    """
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
    """Draw the cache as a bar of `width` columns. Shared cells are drawn as `=`, free cells as `.`,
    other cells as the mark of their segment. Every segment that is not empty gets at least one
    column.
    """
    parts = []
    for segment in segments:
        if segment.mark != FREE_MARK:
            parts += [(SHARED_MARK, segment.shared), (segment.mark, segment.cells - segment.shared)]
    bar = draw_bar(parts, sum(segment.cells for segment in segments), width)
    return f"[{bar.ljust(width, FREE_MARK)}]"
