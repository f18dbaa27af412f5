"""Compares two GGUF models: metadata, tensor names and types, and the relative error between tensor
values.

Tensors are decoded by ggml's own routines in slabs of rows, so memory stays bounded.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant.gguf.header import GgufArray, MetadataValue, TensorInfo
from quant.model_file.model_header import ModelHeader
from quant.native import ggml
from quant.relative_error import relative_rms, sum_of_squares
from quant.source.source import make_file_row_reader

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SLAB_VALUES = 1 << 22  # values that are decoded at a time
MAX_SHOWN_CHARS = 60  # most characters of a value that are shown


@dataclass(frozen=True, slots=True)
class KeyDifference:
    """A key whose values differ between two models.

    A value is None if that model does not have the key, and "[count kind]" if it is an array.
    """

    key: str
    left_value: str | None
    right_value: str | None


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """The comparison of one tensor that both models have.

    `error` is the relative RMS difference of the right values from the left ones (0 if they are
    equal). It is None if the shapes differ, if a type cannot be decoded, or if a side contains NaN
    or infinity. `same_bytes` means that the stored bytes are equal.
    """

    name: str
    left_tensor: TensorInfo
    right_tensor: TensorInfo
    same_bytes: bool
    error: float | None


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The names of the tensors that both models have, and of those that only one of them has."""

    common: tuple[str, ...]
    only_left: tuple[str, ...]
    only_right: tuple[str, ...]


def compare_keys(left: ModelHeader, right: ModelHeader) -> list[KeyDifference]:
    """Return the keys with different types or values: first in the order of `left`, then the keys
    that only `right` has.
    """
    ours, theirs = ({field.key: field for field in header.fields} for header in (left, right))
    differences = []
    for key in [*ours, *(key for key in theirs if key not in ours)]:
        left_field, right_field = ours.get(key), theirs.get(key)
        if (
            left_field is None
            or right_field is None
            or (left_field.kind, left_field.read_raw())
            != (right_field.kind, right_field.read_raw())
        ):
            differences.append(
                KeyDifference(
                    key,
                    *(
                        None if field is None else _shorten(field.value)
                        for field in (left_field, right_field)
                    ),
                )
            )
    return differences


def compare_names(left: ModelHeader, right: ModelHeader) -> TensorNames:
    """Return the names of common tensors and of tensors in only one model, each in the order of its
    file.
    """
    ours, theirs = ([tensor.name for tensor in header.tensors] for header in (left, right))
    left_names, right_names = set(ours), set(theirs)
    return TensorNames(
        tuple(name for name in ours if name in right_names),
        tuple(name for name in ours if name not in right_names),
        tuple(name for name in theirs if name not in left_names),
    )


def compare_tensors(left: ModelHeader, right: ModelHeader) -> Iterator[TensorDifference]:
    """Compare every tensor that both models have, and yield each result."""
    ours, theirs = ({tensor.name: tensor for tensor in header.tensors} for header in (left, right))
    for name in compare_names(left, right).common:
        yield _compare_tensor(name, ours[name], theirs[name])


def _compare_tensor(name: str, left: TensorInfo, right: TensorInfo) -> TensorDifference:
    import numpy as np

    if left.shape != right.shape:
        return TensorDifference(name, left, right, same_bytes=False, error=None)
    read_left, read_right = _reader(left), _reader(right)
    same, is_decodable = (
        left.type == right.type,
        ggml.is_decodable(left.type) and ggml.is_decodable(right.type),
    )
    noise = signal = 0.0
    step = max(1, SLAB_VALUES // left.columns)
    for first in range(0, left.rows, step):
        left_rows, right_rows = (
            read(first, min(first + step, left.rows)) for read in (read_left, read_right)
        )
        if left.type == right.type and (left_rows == right_rows).all():
            if is_decodable:
                signal += sum_of_squares(
                    ggml.decode(left_rows, left.type, left.columns, label=name)
                )
            continue
        same = False
        if not is_decodable:
            break
        ours = ggml.decode(left_rows, left.type, left.columns, label=name)
        theirs = ggml.decode(right_rows, right.type, right.columns, label=name)
        signal += sum_of_squares(ours)
        with np.errstate(invalid="ignore"):  # infinity minus infinity
            noise += sum_of_squares(np.subtract(ours, theirs, dtype=np.float64))
    error = 0.0 if same else relative_rms(noise, signal) if is_decodable else None
    return TensorDifference(name, left, right, same, error)


def _reader(tensor: TensorInfo) -> "Callable[[int, int], NDArray[np.uint8]]":
    return make_file_row_reader(
        tensor.file, tensor.offset, ggml.row_bytes(tensor.type, tensor.columns), tensor.name
    )


def _shorten(value: MetadataValue) -> str:
    if isinstance(value, GgufArray):
        return f"[{value.count} {value.kind}]"
    text = str(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 1] + "…"
