"""Cuts the state of one sequence out of a state that llama.cpp wrote for all sequences, or
transposes the V cache in a state.

With flash attention the V cache of a state is stored cell by cell, and without it channel by
channel. llama.cpp accepts a state only in the order of its context (state_write_data and
state_read_data of llama-kv-cache.cpp). The format has no version: state_trial.py tries once whether
this build of llama.cpp has the expected one. After that, unexpected bytes are a bug here and fail an
assertion.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
HEAD_DTYPE = np.dtype([("magic", "<u4"), ("sequence", "<i4"), ("streams", "<u4"), ("cells", "<u4")])
CELL_DTYPE = np.dtype(
    [("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")]
)  # the cells of a single sequence
LAYOUT_DTYPE = np.dtype([("by_channel", "<u4"), ("layers", "<u4")])
# head of the keys of a layer, and of values stored by cell
ROWS_DTYPE = np.dtype([("type", "<i4"), ("nbytes", "<u8")])
VALUE_BYTES = {0: 4, 1: 2, 30: 2}  # bytes per number, by enum ggml_type: f32, f16, bf16
CHANNELS_DTYPE = np.dtype(
    [("type", "<i4"), ("size", "<u4"), ("count", "<u4")]
)  # head of the values of a layer stored by channel


def transpose_values(state: memoryview, start: int = 0) -> memoryview:
    """Return a state of one sequence with its V cache in the other order (cell by cell or channel
    by channel), without the cells before position `start`. The V cache must have 16 or 32 bits per
    number.
    """
    array = np.frombuffer(state, np.uint8)
    return _joined(
        _slices(
            array,
            int(array[: HEAD_DTYPE.itemsize].view(HEAD_DTYPE)["sequence"][0]),
            start,
            transpose=True,
        )
    )


def extract_sequence(state: memoryview, sequence: int) -> memoryview:
    """Return the state of one sequence from a state of all sequences. The bytes are those that
    llama.cpp writes for this sequence alone.
    """
    return _joined(_slices(np.frombuffer(state, np.uint8), sequence, 0, transpose=False))


def _joined(parts: Iterator[Bytes]) -> memoryview:
    """Return the parts as one buffer."""
    return np.concatenate(list(parts)).data


def _slices(state: Bytes, sequence: int, start: int, transpose: bool) -> Iterator[Bytes]:
    """Yield the parts of a new state that contains only the cells of `sequence` from position
    `start` on. `transpose`: store the V cache in the other order.
    """
    at = 0

    def read(dtype: np.dtype, count: int = 1) -> NDArray[np.void]:
        """Return the next `count` items of type `dtype` of the state."""
        nonlocal at
        items = state[at : at + dtype.itemsize * count].view(dtype)
        assert len(items) == count, "a state that ends early"
        at += dtype.itemsize * count
        return items

    head = read(HEAD_DTYPE)[0]
    assert head["streams"] == 1, "one pool of cells"
    count = int(head["cells"])
    cells, words = _cells(state[at:], count, sequence)
    at += 4 * words
    selected = np.flatnonzero((cells["sequence"] == sequence) & (cells["position"] >= start))
    is_complete = len(selected) == count
    yield np.array([(head["magic"], sequence, 1, len(selected))], HEAD_DTYPE).view(np.uint8)
    yield cells[selected].view(np.uint8)
    form = read(LAYOUT_DTYPE)
    channels, layers = bool(form["by_channel"][0]), int(form["layers"][0])
    yield np.array([(channels != transpose, layers)], LAYOUT_DTYPE).view(np.uint8)
    for _ in range(layers):
        keys = read(ROWS_DTYPE)
        yield keys.view(np.uint8)
        rows = read(np.dtype(np.uint8), count * int(keys["nbytes"][0])).view(np.uint8)
        yield rows if is_complete else rows.reshape(count, -1)[selected].reshape(-1)
    for _ in range(layers):
        if channels:
            kind, size, width = read(CHANNELS_DTYPE)[0].tolist()
        else:
            kind, nbytes = read(ROWS_DTYPE)[0].tolist()
            size = VALUE_BYTES[kind]
            width = nbytes // size
        if channels == transpose:
            yield np.array([(kind, size * width)], ROWS_DTYPE).view(np.uint8)
        else:
            yield np.array([(kind, size, width)], CHANNELS_DTYPE).view(np.uint8)
        values = read(np.dtype(f"<u{size}"), count * width)
        table = values.reshape((width, count) if channels else (count, width))
        if not is_complete:
            table = table[:, selected] if channels else table[selected]
        yield np.ascontiguousarray(table.T if transpose else table).reshape(-1).view(np.uint8)
    assert at == len(state), "a state with bytes after its end"


def _cells(state: Bytes, count: int, sequence: int) -> tuple[NDArray[np.void], int]:
    """Return the cells of a state as an array of CELL_DTYPE, and how many 32-bit words they take in
    the state. Cells that do not belong to `sequence` get the sequence id −1 or another id.

    In the state, a cell is its position, the number of its sequences, and their ids.
    """
    cells = state[: CELL_DTYPE.itemsize * count].view(CELL_DTYPE)
    if len(cells) == count and (cells["sequences"] == 1).all():
        return cells, 3 * count
    words = state[: state.size // 4 * 4].data.cast("i")
    result, at = np.empty(count, CELL_DTYPE), 0
    for number in range(count):
        end = at + 2 + words[at + 1]
        result[number] = (
            words[at],
            1,
            sequence if sequence in words[at + 2 : end].tolist() else -1,
        )
        at = end
    return result, at
