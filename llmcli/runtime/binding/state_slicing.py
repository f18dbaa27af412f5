"""Cuts one sequence out of a state that llama.cpp wrote, or transposes the values in a state.

With flash attention the values of a cell are consecutive in a state; without it those of a channel
are. llama.cpp accepts a state only in the layout of the context (state_write_data and
state_read_data of llama-kv-cache.cpp). The bytes were written by llama.cpp just before, so anything
unexpected in them is a bug here and fails an assertion.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
HEAD_DTYPE = np.dtype([("magic", "<u4"), ("sequence", "<i4"), ("streams", "<u4"), ("cells", "<u4")])
CELL_DTYPE = np.dtype(
    [("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")]
)  # the cells of a single sequence
LAYOUT_DTYPE = np.dtype([("turned", "<u4"), ("layers", "<u4")])
# head of the keys of a layer, and of values stored by cell
ROWS_DTYPE = np.dtype([("type", "<i4"), ("nbytes", "<u8")])
VALUE_BYTES = {0: 4, 1: 2, 30: 2}  # bytes per value of an enum ggml_type: f32, f16, bf16
CHANNELS_DTYPE = np.dtype(
    [("type", "<i4"), ("size", "<u4"), ("count", "<u4")]
)  # head of the values of a layer stored by channel


def transpose_values(state: memoryview, start: int = 0) -> memoryview:
    """Return the state with transposed values, without the cells before position `start`. Values
    must have 16 or 32 bits each.
    """
    array = np.frombuffer(state, np.uint8)
    return _joined(
        _carved(
            array,
            int(array[: HEAD_DTYPE.itemsize].view(HEAD_DTYPE)["sequence"][0]),
            start,
            turn=True,
        )
    )


def extract_sequence(state: memoryview, sequence: int) -> memoryview:
    """Return the state of one sequence, cut out of a state of all sequences. The bytes are those
    that llama.cpp writes for this sequence alone.
    """
    return _joined(_carved(np.frombuffer(state, np.uint8), sequence, 0, turn=False))


def _joined(parts: Iterator[Bytes]) -> memoryview:
    return np.concatenate(list(parts)).data


def _carved(state: Bytes, sequence: int, start: int, turn: bool) -> Iterator[Bytes]:
    """Yield the parts of a state that contains only the cells of `sequence` from position `start`
    on. `turn`: transpose the values.
    """
    at = 0

    def take(kind: np.dtype, count: int = 1) -> NDArray[np.void]:
        nonlocal at
        items = state[at : at + kind.itemsize * count].view(kind)
        assert len(items) == count, "a state that ends early"
        at += kind.itemsize * count
        return items

    head = take(HEAD_DTYPE)[0]
    assert head["streams"] == 1, "one pool of cells"
    count = int(head["cells"])
    cells, words = _cells(state[at:], count, sequence)
    at += 4 * words
    kept = np.flatnonzero((cells["sequence"] == sequence) & (cells["position"] >= start))
    takes_all = len(kept) == count
    yield np.array([(head["magic"], sequence, 1, len(kept))], HEAD_DTYPE).view(np.uint8)
    yield cells[kept].view(np.uint8)
    form = take(LAYOUT_DTYPE)
    channels, layers = bool(form["turned"][0]), int(form["layers"][0])
    yield np.array([(channels != turn, layers)], LAYOUT_DTYPE).view(np.uint8)
    for _ in range(layers):
        keys = take(ROWS_DTYPE)
        yield keys.view(np.uint8)
        rows = take(np.dtype(np.uint8), count * int(keys["nbytes"][0])).view(np.uint8)
        yield rows if takes_all else rows.reshape(count, -1)[kept].reshape(-1)
    for _ in range(layers):
        if channels:
            kind, size, width = take(CHANNELS_DTYPE)[0].tolist()
        else:
            kind, nbytes = take(ROWS_DTYPE)[0].tolist()
            size = VALUE_BYTES[kind]
            width = nbytes // size
        if channels == turn:
            yield np.array([(kind, size * width)], ROWS_DTYPE).view(np.uint8)
        else:
            yield np.array([(kind, size, width)], CHANNELS_DTYPE).view(np.uint8)
        values = take(np.dtype(f"<u{size}"), count * width)
        table = values.reshape((width, count) if channels else (count, width))
        chosen = table if takes_all else table[:, kept] if channels else table[kept]
        yield np.ascontiguousarray(chosen.T if turn else chosen).reshape(-1).view(np.uint8)
    assert at == len(state), "a state with bytes after its end"


def _cells(state: Bytes, count: int, sequence: int) -> tuple[NDArray[np.void], int]:
    """Return the cells as CELL_DTYPE, and how many 32-bit words they take in the state. A cell that
    does not belong to `sequence` gets another sequence number.

    In the state, a cell is its position, the number of its sequences, and their ids.
    """
    alone = state[: CELL_DTYPE.itemsize * count].view(CELL_DTYPE)
    if len(alone) == count and (alone["sequences"] == 1).all():
        return alone, 3 * count
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
