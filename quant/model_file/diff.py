"""Compares two GGUF models, called left and right: metadata, tensor names and types, and the
relative error between tensor values.

Tensors are decoded by ggml's own routines in slabs of rows, so that memory stays bounded.
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
MAX_SHOWN_CHARS = 60  # limit of the characters of a value that are shown


@dataclass(frozen=True, slots=True)
class KeyDifference:
    """A metadata key whose values differ between two models. The values are shortened texts for a
    table.

    A value is None if the model does not have the key. An array is shown as its length and type
    ("[32000 string]").
    """

    key: str
    left_value: str | None
    right_value: str | None


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """The comparison of one tensor that both models have.

    `error` is the relative RMS difference of the right values from the left ones, 0 if they are
    equal. It is None if the shapes differ, if a type cannot be decoded, or if one tensor contains
    NaN or infinity. `same_bytes` means that the stored bytes are equal.
    """

    name: str
    left_tensor: TensorInfo
    right_tensor: TensorInfo
    same_bytes: bool
    error: float | None


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The names of the tensors that both models have, and of those that only one model has."""

    common: tuple[str, ...]
    only_left: tuple[str, ...]
    only_right: tuple[str, ...]


def compare_keys(left: ModelHeader, right: ModelHeader) -> list[KeyDifference]:
    """Return the metadata keys with different types or values: first in the order of `left`, then
    the keys that only `right` has.
    """
    left_fields, right_fields = (
        {field.key: field for field in header.fields} for header in (left, right)
    )
    differences = []
    for key in [*left_fields, *(key for key in right_fields if key not in left_fields)]:
        left_field, right_field = left_fields.get(key), right_fields.get(key)
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
    """Return the names of the tensors that both models have and of those that only one model has,
    each in the order of its file.
    """
    left_order, right_order = (
        [tensor.name for tensor in header.tensors] for header in (left, right)
    )
    left_names, right_names = set(left_order), set(right_order)
    return TensorNames(
        tuple(name for name in left_order if name in right_names),
        tuple(name for name in left_order if name not in right_names),
        tuple(name for name in right_order if name not in left_names),
    )


def compare_tensors(left: ModelHeader, right: ModelHeader) -> Iterator[TensorDifference]:
    """Compare every tensor that both models have, and yield one result for each."""
    left_tensors, right_tensors = (
        {tensor.name: tensor for tensor in header.tensors} for header in (left, right)
    )
    for name in compare_names(left, right).common:
        yield _compare_tensor(name, left_tensors[name], right_tensors[name])


def _compare_tensor(name: str, left: TensorInfo, right: TensorInfo) -> TensorDifference:
    import numpy as np

    if left.shape != right.shape:
        return TensorDifference(name, left, right, same_bytes=False, error=None)
    read_left, read_right = _reader(left), _reader(right)
    same_bytes, is_decodable = (
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
        same_bytes = False
        if not is_decodable:
            break
        left_values = ggml.decode(left_rows, left.type, left.columns, label=name)
        right_values = ggml.decode(right_rows, right.type, right.columns, label=name)
        signal += sum_of_squares(left_values)
        with np.errstate(invalid="ignore"):  # infinity minus infinity
            noise += sum_of_squares(np.subtract(left_values, right_values, dtype=np.float64))
    error = 0.0 if same_bytes else relative_rms(noise, signal) if is_decodable else None
    return TensorDifference(name, left, right, same_bytes, error)


def _reader(tensor: TensorInfo) -> "Callable[[int, int], NDArray[np.uint8]]":
    """Return a function that reads rows first .. last of a tensor as stored bytes."""
    return make_file_row_reader(
        tensor.file, tensor.offset, ggml.row_bytes(tensor.type, tensor.columns), tensor.name
    )


def _shorten(value: MetadataValue) -> str:
    """Return a metadata value as a text of at most MAX_SHOWN_CHARS characters. An array gives its
    length and type.
    """
    if isinstance(value, GgufArray):
        return f"[{value.count} {value.kind}]"
    text = str(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 1] + "…"
