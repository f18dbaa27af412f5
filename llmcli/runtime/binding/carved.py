"""One sequence's state, made of what llama.cpp wrote: its cells picked out, its values laid the
other way round.

With flash attention the values of a cell lie together, without it those of a channel do, and
llama.cpp takes a state only into a context of its own kind (state_write_data and state_read_data of
llama-kv-cache.cpp). What is read here was written by llama.cpp just before; what it does not spell
as expected is a bug here, and crashes.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
HEAD = np.dtype([("magic", "<u4"), ("sequence", "<i4"), ("streams", "<u4"), ("cells", "<u4")])
CELL = np.dtype(
    [("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")]
)  # of one sequence alone
FORM = np.dtype([("turned", "<u4"), ("layers", "<u4")])
ROWS = np.dtype([("type", "<i4"), ("nbytes", "<u8")])  # of keys, and of values cell by cell
SIZES = {0: 4, 1: 2, 30: 2}  # enum ggml_type: f32, f16, bf16
CHANNELS = np.dtype(
    [("type", "<i4"), ("size", "<u4"), ("count", "<u4")]
)  # of values channel by channel


def turned(state: memoryview, start: int = 0) -> memoryview:
    """The same cells, those from position `start` on, with the values the other way round: 16 or 32
    bits each.
    """
    array = np.frombuffer(state, np.uint8)
    return _joined(
        _carved(array, int(array[: HEAD.itemsize].view(HEAD)["sequence"][0]), start, turn=True)
    )


def cut(pool: memoryview, sequence: int) -> memoryview:
    """The state of one sequence out of that of all: the bytes that llama.cpp gives of it alone."""
    return _joined(_carved(np.frombuffer(pool, np.uint8), sequence, 0, turn=False))


def _joined(parts: Iterator[Bytes]) -> memoryview:
    return np.concatenate(list(parts)).data


def _carved(state: Bytes, sequence: int, start: int, turn: bool) -> Iterator[Bytes]:
    """The parts of a state with the cells of `sequence` from position `start` on."""
    at = 0

    def take(kind: np.dtype, count: int = 1) -> NDArray[np.void]:
        nonlocal at
        found = state[at : at + kind.itemsize * count].view(kind)
        assert len(found) == count, "a state that ends early"
        at += kind.itemsize * count
        return found

    head = take(HEAD)[0]
    assert head["streams"] == 1, "one pool of cells"
    count = int(head["cells"])
    cells, words = _cells(state[at:], count, sequence)
    at += 4 * words
    kept = np.flatnonzero((cells["sequence"] == sequence) & (cells["position"] >= start))
    whole = len(kept) == count
    yield np.array([(head["magic"], sequence, 1, len(kept))], HEAD).view(np.uint8)
    yield cells[kept].view(np.uint8)
    form = take(FORM)
    channels, layers = bool(form["turned"][0]), int(form["layers"][0])
    yield np.array([(channels != turn, layers)], FORM).view(np.uint8)
    for _ in range(layers):
        keys = take(ROWS)
        yield keys.view(np.uint8)
        rows = take(np.dtype(np.uint8), count * int(keys["nbytes"][0])).view(np.uint8)
        yield rows if whole else rows.reshape(count, -1)[kept].reshape(-1)
    for _ in range(layers):
        if channels:
            kind, size, width = take(CHANNELS)[0].tolist()
        else:
            kind, nbytes = take(ROWS)[0].tolist()
            size = SIZES[kind]
            width = nbytes // size
        if channels == turn:
            yield np.array([(kind, size * width)], ROWS).view(np.uint8)
        else:
            yield np.array([(kind, size, width)], CHANNELS).view(np.uint8)
        values = take(np.dtype(f"<u{size}"), count * width)
        laid = values.reshape((width, count) if channels else (count, width))
        part = laid if whole else laid[:, kept] if channels else laid[kept]
        yield np.ascontiguousarray(part.T if turn else part).reshape(-1).view(np.uint8)
    assert at == len(state), "a state that goes on behind its end"


def _cells(state: Bytes, count: int, sequence: int) -> tuple[NDArray[np.void], int]:
    """Each cell as one of `sequence`, where that holds it, else of −1 or another one; and the words
    they take.

    A cell is its position, how many sequences hold it, and which.
    """
    alone = state[: CELL.itemsize * count].view(CELL)
    if len(alone) == count and (alone["sequences"] == 1).all():
        return alone, 3 * count
    words = state[: state.size // 4 * 4].data.cast("i")
    found, at = np.empty(count, CELL), 0
    for number in range(count):
        behind = at + 2 + words[at + 1]
        found[number] = (
            words[at],
            1,
            sequence if sequence in words[at + 2 : behind].tolist() else -1,
        )
        at = behind
    return found, at
