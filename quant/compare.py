"""Two GGUF models held side by side: metadata, tensors, types, and how far each tensor's values are
apart.

Slabs of rows are decoded by ggml's own routines, so memory stays bounded. It knows files and
numbers, not what the difference does to an answer: that is for an evaluation.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant import native
from quant.apart import relative, squares
from quant.container import Array, Header, TensorInfo, Value
from quant.source import stored_rows

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SLAB = 1 << 22  # values decoded at a time
SHOWN = 60  # characters of a value


@dataclass(frozen=True, slots=True)
class KeyDifference:
    """One key that differs; a side is None where it lacks the key, "[count kind]" for an array."""

    key: str
    left: str | None
    right: str | None


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor that both models have.

    `error` is the relative RMS of right against left (0: the same values), None where the shapes
    differ, where a type cannot be turned into numbers, and where a side holds NaN or infinity;
    `same_bytes` says that not even a bit differs.
    """

    name: str
    left: TensorInfo
    right: TensorInfo
    same_bytes: bool
    error: float | None


@dataclass(frozen=True, slots=True)
class Names:
    """Tensors by the side that has them."""

    both: tuple[str, ...]
    left: tuple[str, ...]
    right: tuple[str, ...]


def keys(left: Header, right: Header) -> list[KeyDifference]:
    """Keys whose stored type or value differ, in the order of `left`, then those only `right` has."""
    ours, theirs = ({field.key: field for field in header.fields} for header in (left, right))
    found = []
    for key in [*ours, *(key for key in theirs if key not in ours)]:
        one, other = ours.get(key), theirs.get(key)
        if one is None or other is None or (one.kind, one.copy()) != (other.kind, other.copy()):
            found.append(
                KeyDifference(
                    key, *(None if field is None else _shown(field.value) for field in (one, other))
                )
            )
    return found


def names(left: Header, right: Header) -> Names:
    """Which side has which tensors, each in its file's order."""
    ours, theirs = ([tensor.name for tensor in header.tensors] for header in (left, right))
    one, other = set(ours), set(theirs)
    return Names(
        tuple(name for name in ours if name in other),
        tuple(name for name in ours if name not in other),
        tuple(name for name in theirs if name not in one),
    )


def tensors(left: Header, right: Header) -> Iterator[TensorDifference]:
    """Every tensor that both have, one after the other, as it is read."""
    ours, theirs = ({tensor.name: tensor for tensor in header.tensors} for header in (left, right))
    for name in names(left, right).both:
        yield _compared(name, ours[name], theirs[name])


def _compared(name: str, left: TensorInfo, right: TensorInfo) -> TensorDifference:
    import numpy as np

    if left.shape != right.shape:
        return TensorDifference(name, left, right, same_bytes=False, error=None)
    read_left, read_right = _reader(left), _reader(right)
    same, numbers = (
        left.type == right.type,
        native.decodable(left.type) and native.decodable(right.type),
    )
    noise = signal = 0.0
    step = max(1, SLAB // left.columns)
    for first in range(0, left.rows, step):
        one, other = (read(first, min(first + step, left.rows)) for read in (read_left, read_right))
        if left.type == right.type and (one == other).all():
            if numbers:
                signal += squares(native.decode(one, left.type, left.columns, label=name))
            continue
        same = False
        if not numbers:
            break
        ours = native.decode(one, left.type, left.columns, label=name)
        theirs = native.decode(other, right.type, right.columns, label=name)
        signal += squares(ours)
        with np.errstate(invalid="ignore"):  # infinity less infinity
            noise += squares(np.subtract(ours, theirs, dtype=np.float64))
    error = 0.0 if same else relative(noise, signal) if numbers else None
    return TensorDifference(name, left, right, same, error)


def _reader(tensor: TensorInfo) -> "Callable[[int, int], NDArray[np.uint8]]":
    return stored_rows(
        tensor.file, tensor.offset, native.row_bytes(tensor.type, tensor.columns), tensor.name
    )


def _shown(value: Value) -> str:
    if isinstance(value, Array):
        return f"[{value.count} {value.kind}]"
    text = str(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
