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
    VALUE_BYTES,
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

    def select(self, selected: "NDArray[np.intp] | slice", by_channel: bool) -> "_Table":
        """Return the table of the selected cells, stored by channel or by cell. Raises ForeignLayout
        for values that cannot be stored by channel.
        """
        if self.cells.ndim == 2:
            rows = self.cells[selected]
            if not by_channel:
                return _Table(self.head, rows)
            kind, nbytes = self.head.view(ROWS_DTYPE)[0].tolist()
            if (size := VALUE_BYTES.get(kind)) is None:
                raise ForeignLayout("values of a type that cannot be stored by channel")
            head = np.array([(kind, size, nbytes // size)], CHANNELS_DTYPE).view(np.uint8)
            return _Table(head, rows.reshape(len(rows), -1, size).transpose(1, 0, 2))
        values = self.cells[:, selected]
        if by_channel:
            return _Table(self.head, values)
        kind, size, width = self.head.view(CHANNELS_DTYPE)[0].tolist()
        head = np.array([(kind, size * width)], ROWS_DTYPE).view(np.uint8)
        rows = np.ascontiguousarray(values.transpose(1, 0, 2)).reshape(values.shape[1], -1)
        return _Table(head, rows)


@dataclass(frozen=True, slots=True)
class _ParsedState:
    """A state as arrays. `tables`: the keys of all layers, and then their values."""

    head: NDArray[np.void]
    positions: NDArray[np.int32]
    by_channel: bool
    tables: tuple[_Table, ...]

    def find_cells(self, start: int, end: int) -> "NDArray[np.intp] | slice":
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


def join_ranges(ranges: Sequence[CellRange], by_channel: bool | None = None) -> memoryview:
    """Return one state with the cells of all ranges, each of which begins where the one before
    ends. A single range is cut out of its state. The cells are in the order of their positions.
    `by_channel`: whether the values are stored by channel, as a context without flash attention
    wants them; None: as in the first range.

    Raises ForeignLayout if a state has another layout, or lacks cells of its range.
    """
    parsed = [_parse(each.state) for each in ranges]
    selections = [
        state.find_cells(each.start, each.end) for state, each in zip(parsed, ranges, strict=True)
    ]
    first = parsed[0]
    assert all(before.end == after.start for before, after in pairwise(ranges)), "ranges with a gap"
    if any(len(other.tables) != len(first.tables) for other in parsed):
        raise ForeignLayout("another number of layers")
    if by_channel is None:
        by_channel = first.by_channel
    start, end, n_layers = ranges[0].start, ranges[-1].end, len(first.tables) // 2
    head, cells = first.head.copy(), np.empty(end - start, CELL_DTYPE)
    head["cells"] = end - start
    cells["position"] = np.arange(start, end)
    cells["sequences"], cells["sequence"] = 1, head["sequence"]
    layout = np.array([(by_channel, n_layers)], LAYOUT_DTYPE)
    parts = [head.view(np.uint8), cells.view(np.uint8), layout.view(np.uint8)]
    for number in range(2 * n_layers):
        tables = [
            state.tables[number].select(selected, by_channel and number >= n_layers)
            for state, selected in zip(parsed, selections, strict=True)
        ]
        if any(table.head.tobytes() != tables[0].head.tobytes() for table in tables):
            raise ForeignLayout("keys or values of another type")
        axis = tables[0].cells.ndim - 2  # that of the cells
        parts.append(tables[0].head)
        parts.append(np.concatenate([table.cells for table in tables], axis=axis).reshape(-1))
    return np.concatenate(parts).data


def check_range(state: State, start: int, end: int) -> bool:
    """Return whether the values of a state are stored by channel. Raises ForeignLayout if the state
    cannot be cut, or lacks cells from `start` to `end`.
    """
    parsed = _parse(state)
    parsed.find_cells(start, end)
    return parsed.by_channel


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
    by_channel, layers = read(LAYOUT_DTYPE.itemsize).view(LAYOUT_DTYPE)[0].tolist()
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
    return _ParsedState(head, cells["position"], bool(by_channel), tuple(tables))
