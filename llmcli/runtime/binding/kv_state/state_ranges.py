"""Cuts the state of one sequence to a range of positions, and joins such ranges, so that a text can
be stored in parts.

Only states of a plain KV cache can be cut: recurrent state and cells of a sliding window belong to
the end of a text. The layout is that of state_slicing.py. A state may come from a file, so
everything is checked against its size: llama.cpp does not check it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.binding.kv_state.state_slicing import (
    CELL_DTYPE,
    CHANNELS_DTYPE,
    HEAD_DTYPE,
    LAYOUT_DTYPE,
    ROWS_DTYPE,
    Bytes,
)

State = bytes | memoryview
MAX_LAYERS = 4096


class ForeignLayout(ValueError):
    """Raised for a state that is not laid out as that of one sequence of a plain KV cache."""


@dataclass(frozen=True, slots=True)
class CellRange:
    """The positions from `start` to `end` of a state."""

    state: State
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Table:
    """Keys or values of a layer. `head`: the bytes before them. `cells`: uint8, `[cells, bytes]`, or
    `[channels, cells, bytes]` for values that are stored by channel.
    """

    head: Bytes
    cells: Bytes

    def select(self, selected: "NDArray[np.intp] | slice") -> Bytes:
        """Return the bytes of the selected cells."""
        return self.cells[selected] if self.cells.ndim == 2 else self.cells[:, selected]


@dataclass(frozen=True, slots=True)
class _ParsedState:
    """A state as arrays. `layout`: the bytes between the cells and the first layer."""

    head: NDArray[np.void]
    positions: NDArray[np.int32]
    layout: Bytes
    tables: tuple[_Table, ...]

    def select(self, start: int, end: int) -> "NDArray[np.intp] | slice":
        """Return where the cells of the positions from `start` to `end` are, in this order. Raises
        ForeignLayout if one is missing.
        """
        first = int(np.searchsorted(self.positions, start))
        found = self.positions[first : first + end - start]
        wanted = np.arange(start, end, dtype=np.int32)
        if np.array_equal(found, wanted):  # the cells are in the order of their positions
            return slice(first, first + end - start)
        order = np.argsort(self.positions, kind="stable")
        first = int(np.searchsorted(self.positions, start, sorter=order))
        selected = order[first : first + end - start]
        if not np.array_equal(self.positions[selected], wanted):
            raise ForeignLayout("a state without some of its cells")
        return selected


def join_ranges(ranges: Sequence[CellRange]) -> memoryview:
    """Return one state with the cells of all ranges, each of which begins where the one before
    ends. A single range is cut out of its state. The cells are in the order of their positions.

    Raises ForeignLayout if a state has another layout, or lacks cells of its range.
    """
    parsed = [_parse(each.state) for each in ranges]
    selections = [
        state.select(each.start, each.end) for state, each in zip(parsed, ranges, strict=True)
    ]
    first = parsed[0]
    assert all(before.end == after.start for before, after in pairwise(ranges)), "ranges with a gap"
    for other in parsed[1:]:
        if not np.array_equal(other.layout, first.layout) or [
            table.head.tobytes() for table in other.tables
        ] != [table.head.tobytes() for table in first.tables]:
            raise ForeignLayout("ranges of different caches")
    start, end = ranges[0].start, ranges[-1].end
    head, cells = first.head.copy(), np.empty(end - start, CELL_DTYPE)
    head["cells"] = end - start
    cells["position"] = np.arange(start, end)
    cells["sequences"], cells["sequence"] = 1, head["sequence"]
    parts = [head.view(np.uint8), cells.view(np.uint8), first.layout]
    for number, table in enumerate(first.tables):
        tables = [state.tables[number] for state in parsed]
        pieces = [
            other.select(selected) for other, selected in zip(tables, selections, strict=True)
        ]
        joined = (
            pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=table.cells.ndim - 2)
        )
        parts += [table.head, np.ascontiguousarray(joined).reshape(-1)]
    return np.concatenate(parts).data


def check_range(state: State, start: int, end: int) -> None:
    """Raise ForeignLayout if a state cannot be cut, or lacks cells from `start` to `end`."""
    _parse(state).select(start, end)


def _parse(state: State) -> _ParsedState:
    """Return a state as arrays, which share its memory. Raises ForeignLayout."""
    array, at = np.frombuffer(state, np.uint8), 0

    def read(nbytes: int) -> Bytes:
        """Return the next bytes of the state."""
        nonlocal at
        if nbytes > array.size - at:
            raise ForeignLayout("a state that ends early")
        at += nbytes
        return array[at - nbytes : at]

    head = read(HEAD_DTYPE.itemsize).view(HEAD_DTYPE)
    count = int(head["cells"][0])
    if head["streams"][0] != 1 or not count:
        raise ForeignLayout("a state of several pools, or of none")
    cells = read(CELL_DTYPE.itemsize * count).view(CELL_DTYPE)
    if (cells["sequences"] != 1).any() or (cells["sequence"] != head["sequence"]).any():
        raise ForeignLayout("cells of other sequences")
    layout = read(LAYOUT_DTYPE.itemsize)
    by_channel, layers = layout.view(LAYOUT_DTYPE)[0].tolist()
    if by_channel > 1 or not 0 < layers <= MAX_LAYERS:
        raise ForeignLayout("a layout that is unknown")
    tables = []
    for number in range(2 * layers):
        if number < layers or not by_channel:
            row_head = read(ROWS_DTYPE.itemsize)
            nbytes = int(row_head.view(ROWS_DTYPE)["nbytes"][0])
            tables.append(_Table(row_head, read(count * nbytes).reshape(count, nbytes)))
        else:
            channel_head = read(CHANNELS_DTYPE.itemsize)
            _, size, width = channel_head.view(CHANNELS_DTYPE)[0].tolist()
            values = read(count * size * width).reshape(width, count, size)
            tables.append(_Table(channel_head, values))
    if at != array.size:
        raise ForeignLayout("a state with bytes after its end")
    return _ParsedState(head, cells["position"], layout, tuple(tables))
