"""Stored tensors of quantized checkpoints in memory, which count how often they are read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quant.checkpoint import tensor_views
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.quantized import INPUTS
from quant.checkpoint.safetensors import LazyTensor

DTYPES = {"f4": "F32", "f2": "F16", "u1": "U8", "i1": "I8", "i4": "I32", "i8": "I64"}


class Stored:
    """Tensors in memory. `tensors`: by name. `reads`: the name of each tensor that was read, once
    for every read.
    """

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self.reads: list[str] = []
        self.tensors = {name: self._tensor(name, value) for name, value in arrays.items()}

    def _tensor(self, name: str, value: Any) -> LazyTensor:
        """Return an array as a tensor. A pair (dtype, array) has another dtype than the array's."""
        dtype, array = value if isinstance(value, tuple) else ("", np.asarray(value))
        array = np.atleast_1d(np.ascontiguousarray(array))
        data = array.view(np.uint8).reshape(-1, array.shape[-1] * array.itemsize)

        def read(first: int, last: int) -> np.ndarray:
            assert 0 <= first < last <= len(data)
            self.reads.append(name)
            return data[first:last].copy()

        return LazyTensor(name, array.shape, dtype or DTYPES[array.dtype.str[1:]], Path("x"), read)


def restore(settings: dict[str, Any], stored: Stored) -> dict[str, LazyTensor]:
    """Return the tensors that the format `quant_method` of the settings makes."""
    config = CheckpointConfig(settings, "config.json: quantization_config")
    return INPUTS[settings["quant_method"]].restore(config, stored.tensors)


def floats(tensor: LazyTensor, rows_per_read: int = 7) -> np.ndarray:
    """Return all values of a tensor, read in spans of rows."""
    count = tensor_views.row_count(tensor)
    spans = [
        tensor_views.read_floats(tensor, first, min(first + rows_per_read, count))
        for first in range(0, count, rows_per_read)
    ]
    return np.concatenate(spans).reshape(tensor.shape)


def pack_bit_stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes [n, m] into int32 words [n, ceil(m * bits / 32)] without unused bits.

    A code may cross the boundary of two words.
    """
    words = np.zeros((codes.shape[0], -(-codes.shape[1] * bits // 32)), np.int32)
    for i, row in enumerate(codes):
        bit_string = sum(int(code) << (bits * j) for j, code in enumerate(row))
        words[i] = np.frombuffer(bit_string.to_bytes(words.shape[1] * 4, "little"), np.int32)
    return words
