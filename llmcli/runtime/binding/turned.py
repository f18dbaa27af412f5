"""One sequence's state for a context that keeps its values the other way round.

With flash attention the values of a cell lie together, without it those of a channel do, and llama.cpp takes a state
only into a context of its own kind (state_write_data and state_read_data of llama-kv-cache.cpp). What is read here was
written by llama.cpp just before; what it does not spell as expected is a bug here, and crashes.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
HEAD = np.dtype([("magic", "<u4"), ("sequence", "<i4"), ("streams", "<u4"), ("cells", "<u4")])
CELL = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
FORM = np.dtype([("turned", "<u4"), ("layers", "<u4")])
ROWS = np.dtype([("type", "<i4"), ("nbytes", "<u8")])  # of keys, and of values cell by cell
SIZES = {0: 4, 1: 2, 30: 2}  # enum ggml_type: f32, f16, bf16
CHANNELS = np.dtype([("type", "<i4"), ("size", "<u4"), ("count", "<u4")])  # of values channel by channel


def turned(state: memoryview, start: int = 0) -> memoryview:
    """The same cells, those from position `start` on, with the values the other way round: 16 or 32 bits each."""
    return np.concatenate(list(_turned(np.frombuffer(state, np.uint8), start))).data


def _turned(state: Bytes, start: int) -> Iterator[Bytes]:
    at = 0

    def take(kind: np.dtype, count: int = 1) -> NDArray[np.void]:
        nonlocal at
        found = state[at : at + kind.itemsize * count].view(kind)
        assert len(found) == count, "a state that ends early"
        at += kind.itemsize * count
        return found

    head = take(HEAD)
    assert head["streams"][0] == 1, "one pool of cells"
    count = int(head["cells"][0])
    cells = take(CELL, count)
    assert (cells["sequences"] == 1).all(), "one sequence"
    kept = np.flatnonzero(cells["position"] >= start)
    whole = len(kept) == count
    head = head.copy()
    head["cells"] = len(kept)
    yield head.view(np.uint8)
    yield cells[kept].view(np.uint8)
    form = take(FORM)
    channels, layers = bool(form["turned"][0]), int(form["layers"][0])
    yield np.array([(not channels, layers)], FORM).view(np.uint8)
    for _ in range(layers):
        keys = take(ROWS)
        yield keys.view(np.uint8)
        rows = take(np.dtype(np.uint8), count * int(keys["nbytes"][0])).view(np.uint8)
        yield rows if whole else rows.reshape(count, -1)[kept].reshape(-1)
    for _ in range(layers):
        if channels:
            kind, size, width = take(CHANNELS)[0].tolist()
            yield np.array([(kind, size * width)], ROWS).view(np.uint8)
        else:
            kind, nbytes = take(ROWS)[0].tolist()
            size = SIZES[kind]
            width = nbytes // size
            yield np.array([(kind, size, width)], CHANNELS).view(np.uint8)
        values = take(np.dtype(f"<u{size}"), count * width)
        laid = values.reshape((width, count) if channels else (count, width)).T
        part = laid if whole else laid[kept] if channels else laid[:, kept]
        yield np.ascontiguousarray(part).reshape(-1).view(np.uint8)
    assert at == len(state), "a state that goes on behind its end"
