"""Bindings to libggml through ctypes: block sizes of types, and encoding and decoding of rows.

The library is the `libggml-base` that llama-cpp-python installs, so that the bytes are llama.cpp's
own. It is found without importing llama_cpp, which would initialize the compute backends. Where our
own C functions are installed (kernels.py: encoders.c, searches.c, blocks.c), they are used, too.
"""

import ctypes
import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from quant import installation
from quant.errors import DamagedSourceError, UserError
from quant.native import ggml_contract, kernels

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    F32 = NDArray[np.float32]
    I16 = NDArray[np.int16]
    U8 = NDArray[np.uint8]

# enum ggml_type of ggml.h. The gguf package's table is older than the library, and the library
# aborts on unknown numbers, so this table is our own. A test compares it with ggml_type_name().
TYPE_NAMES: dict[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
    42: "Q2_0",
}
TYPE_NUMBERS = {name: number for number, name in TYPE_NAMES.items()}
INTEGER_TYPES = frozenset({"I8", "I16", "I32", "I64"})
FLOAT_TYPES = frozenset({"F64", "F32", "F16", "BF16"})
# The limits of ggml's searches. Above these limits sums become infinite or NaN, on which some
# searches abort the process. MAX_VALUE is more than a format with an F16 scale can represent (Q6_K:
# 65504 * 127 * 32).
MAX_VALUE = 2.0**30
MAX_WEIGHTED_SQUARE = 1e30  # limit of a value's square times its importance
# Our encoders must write ggml's bytes for this many blocks of random values. With other rounding, one
# block in a few differs.
PROBE_ROWS = 64
FP4_TYPES = frozenset({"MXFP4", "NVFP4"})  # these have no F16 scale and no search


@dataclass(frozen=True, slots=True)
class BlockSize:
    """The block size of a tensor type: a block of `values` values is stored in `nbytes` bytes."""

    values: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Importance:
    """The importance of each column when rows are rounded. There is one vector of `vectors`
    [matrices, columns] for every `rows_per_vector` rows.

    The rows to encode may begin in the middle of a tensor: `first_row` is the index of their first
    row among all rows to which the vectors apply.
    """

    vectors: "F32"
    rows_per_vector: int
    first_row: int = 0

    def after(self, rows: int) -> "Importance":
        """Return the importance of the rows that follow the first `rows` rows."""
        return replace(self, first_row=self.first_row + rows)

    def spans(self, first: int, last: int) -> "Iterator[tuple[int, int, F32]]":
        """Split the rows first .. last into ranges with the same vector. Yield each range as
        (first, last, vector).
        """
        while first < last:
            number, within = divmod(self.first_row + first, self.rows_per_vector)
            end = min(last, first + self.rows_per_vector - within)
            yield first, end, self.vectors[number]
            first = end


@dataclass(frozen=True, slots=True)
class ScaleSearchSettings:
    """Settings of the search for scales in C (quant/native/searches.c). A block has `groups` groups
    of `group_values` values.

    `levels` are the lowest and the highest level. `max_minimum` is the largest allowed minimum,
    None if groups have no minimums. `scale_range` is the range of the integer scales, None if the
    format has none. The other settings are explained in quant/methods/search_settings.py.
    """

    group_values: int
    groups: int
    levels: tuple[int, int]
    max_minimum: float | None
    scale_range: tuple[int, int] | None
    value_spread: float
    starts: tuple[float, ...]
    rounds: int
    scale_offsets: tuple[tuple[int, ...], ...]


class _CSearchSettings(ctypes.Structure):
    """`struct settings` of quant/native/searches.c. The fields must have the same order and
    types.
    """

    _fields_ = [
        *(
            (name, ctypes.c_int32)
            for name in (
                "group_values",
                "groups",
                "low",
                "high",
                "has_minimum",
                "scale_low",
                "scale_high",
                "rounds",
                "start_count",
                "pass_count",
            )
        ),
        ("max_minimum", ctypes.c_float),
        ("value_spread", ctypes.c_float),
        ("starts", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
    ]


@dataclass(frozen=True, slots=True)
class ScaleSearchResult:
    """The result of the search: levels [blocks, values] counted from the code of zero, d and m
    [blocks], integer scales and minimums [blocks, groups]. The content of a field that the format
    does not have is undefined.
    """

    levels: "I16"
    d: "F32"
    m: "F32"
    scales: "I16"
    mins: "I16"

    @property
    def addresses(self) -> tuple[int, ...]:
        """Memory addresses of the arrays, in the order of `struct search_result` in blocks.c."""
        return tuple(
            array.ctypes.data for array in (self.levels, self.d, self.m, self.scales, self.mins)
        )


_ToFloat = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


@cache
def open_library() -> ctypes.CDLL:
    """Open libggml-base. Raises UserError, which lists the folders that were searched, if it is not
    found.
    """
    spec = importlib.util.find_spec("llama_cpp")
    folders = (
        [Path(location) / "lib" for location in (spec.submodule_search_locations or [])]
        if spec
        else []
    )
    names = ("libggml-base.so", "libggml-base.dylib", "ggml-base.dll", "libggml-base.dll")
    for folder in folders:
        for name in names:
            if (folder / name).exists():
                return _declare(ctypes.CDLL(str(folder / name)))
    searched = ", ".join(map(str, folders)) or "llama_cpp is not installed"
    raise UserError(
        f"libggml-base was not found ({searched})", hint=installation.install_llama_command()
    )


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the types of the library's functions. Raises UserError if the library is not as
    ggml_contract.py expects.
    """
    ggml_contract.check_library(lib, TYPE_NAMES)
    i64, size, ptr = ctypes.c_int64, ctypes.c_size_t, ctypes.c_void_p
    lib.ggml_quantize_chunk.argtypes = [ctypes.c_int, ptr, ptr, i64, i64, i64, ptr]
    lib.ggml_quantize_chunk.restype = size
    lib.ggml_quantize_requires_imatrix.argtypes = [ctypes.c_int]
    lib.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
    lib.ggml_validate_row_data.argtypes = [ctypes.c_int, ptr, size]
    lib.ggml_validate_row_data.restype = ctypes.c_bool
    for name in ("ggml_fp16_to_fp32_row", "ggml_bf16_to_fp32_row"):
        getattr(lib, name).argtypes = [ptr, ptr, i64]
        getattr(lib, name).restype = None
    return lib


@cache
def block_size(name: str) -> BlockSize:
    """Return the block size of a type. For Q4_K these are 256 values in 144 bytes."""
    traits = open_library().ggml_get_type_traits(TYPE_NUMBERS[name])[0]
    return BlockSize(traits.blck_size, traits.type_size)


def row_bytes(name: str, columns: int) -> int:
    """Return the bytes of one row in type `name`. `columns` must be a multiple of the block
    size.
    """
    block = block_size(name)
    assert columns % block.values == 0, (name, columns)
    return columns // block.values * block.nbytes


def is_quantized(name: str) -> bool:
    """Return whether a type stores codes and scales instead of plain numbers."""
    return name not in FLOAT_TYPES and name not in INTEGER_TYPES


def encode(rows: "F32", name: str, *, label: str, importance: Importance | None = None) -> "U8":
    """Encode float rows [rows, columns] as type `name`. Return bytes [rows, row_bytes].

    Rows are independent, and ctypes releases the GIL while ggml works, so that several threads may
    encode parts of a tensor. Without importance, some types are encoded by our own C code
    (encoders.c), which gives ggml's bytes in a fraction of the time.

    `label` is the tensor's name for errors. Raises DamagedSourceError for NaN, infinite or too
    large values, on which ggml would write garbage or abort. Raises UserError if the importance is
    too large.

    Source: llama_tensor_quantize_impl.
    """
    import numpy as np

    rows = np.ascontiguousarray(rows, dtype=np.float32)
    count, columns = rows.shape
    blocks = np.empty((count, row_bytes(name, columns)), np.uint8)
    number, lib = TYPE_NUMBERS[name], open_library()
    # ggml aborts if a required imatrix is missing
    assert importance or not lib.ggml_quantize_requires_imatrix(number), (label, name)
    require_encodable(rows, name, label=label, importance=importance)
    if importance is None and (our_encoder := _encoder(name)):
        our_encoder(rows.ctypes.data, blocks.ctypes.data, rows.size)
    elif importance is None:
        lib.ggml_quantize_chunk(
            number, rows.ctypes.data, blocks.ctypes.data, 0, count, columns, None
        )
    else:
        for first, last, vector in importance.spans(0, count):
            assert vector.shape == (columns,) and vector.dtype == np.float32, (label, vector.shape)
            addresses = rows[first:last].ctypes.data, blocks[first:last].ctypes.data
            lib.ggml_quantize_chunk(
                number, *addresses, 0, last - first, columns, vector.ctypes.data
            )
    require_finite_scales(blocks, name, label=label)
    return blocks


def require_encodable(
    rows: "F32", name: str, *, label: str, importance: Importance | None = None
) -> None:
    """Raise DamagedSourceError, with `label`, if float rows that will be encoded as `name` contain
    NaN, infinite or too large values. Raise UserError if the importance is too large.
    """
    largest = max(float(rows.max(initial=0)), -float(rows.min(initial=0)))
    if not math.isfinite(largest):
        raise _not_finite(label)
    if is_quantized(name) and name not in FP4_TYPES:
        _check_limits(largest, importance, name, label)


def require_finite_scales(data: "U8", name: str, *, label: str) -> None:
    """Raise DamagedSourceError, with `label`, if rows that were encoded as `name` have infinite
    scales.
    """
    if not open_library().ggml_validate_row_data(TYPE_NUMBERS[name], data.ctypes.data, data.nbytes):
        raise _too_large(label, name)


def require_finite(data: "U8", name: str, *, label: str) -> None:
    """Raise DamagedSourceError, with `label`, if stored rows [rows, row_bytes] of type `name`
    contain NaN or infinity. It is called for rows that are copied unchanged.

    In quantized types only the scales are checked, as in ggml.
    """
    import numpy as np

    data = np.ascontiguousarray(data)
    if name in ("F32", "F64"):
        is_finite = bool(np.isfinite(data.view(np.float32 if name == "F32" else np.float64)).all())
    elif name in ("F16", "BF16"):
        exponent = np.uint16(0x7C00 if name == "F16" else 0x7F80)
        is_finite = not bool(((data.view(np.uint16) & exponent) == exponent).any())
    else:
        is_finite = open_library().ggml_validate_row_data(
            TYPE_NUMBERS[name], data.ctypes.data, data.nbytes
        )
    if not is_finite:
        raise _not_finite(label)


def decode(data: "U8", name: str, columns: int, *, label: str) -> "F32":
    """Decode bytes [rows, row_bytes] of type `name` to floats [rows, columns] with ggml's own
    routines. Raises UserError, with `label`, if the type cannot be decoded.
    """
    import numpy as np

    if name == "F32":
        return data.view(np.float32).reshape(-1, columns)
    if name == "F64":
        return data.view(np.float64).reshape(-1, columns).astype(np.float32)
    data = np.ascontiguousarray(data).reshape(-1, row_bytes(name, columns))
    floats = np.empty((len(data), columns), np.float32)
    _to_float(name, label)(data.ctypes.data, floats.ctypes.data, floats.size)
    return floats


def is_decodable(name: str) -> bool:
    """Return whether decode() supports a type. It does not support integers, and types that ggml
    uses only during computations.
    """
    if name in FLOAT_TYPES:
        return True
    return name not in INTEGER_TYPES and bool(
        open_library().ggml_get_type_traits(TYPE_NUMBERS[name])[0].to_float
    )


@cache
def c_function(name: str, *arguments: Any) -> Callable[..., None] | None:
    """Return the function llmcli_`name` of our C code, or None if it is not installed. `arguments`
    are its ctypes argument types.
    """
    function = getattr(kernels.open_kernels().library, f"llmcli_{name}", None)
    if function is not None:
        function.argtypes, function.restype = arguments, None
    return cast("Callable[..., None] | None", function)


def native_search() -> Callable[..., None] | None:
    """Return our search in C (searches.c), or None if it is not installed."""
    return c_function(
        "search", *[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 5
    )


def run_search(rows: "F32", weights: "F32", settings: ScaleSearchSettings) -> ScaleSearchResult:
    """Search scales and levels for rows of floats [rows, columns] with our C code. `weights`
    [blocks of a row, values] are the same for every row.
    """
    import numpy as np

    run, rows = native_search(), np.ascontiguousarray(rows, np.float32)
    assert run is not None
    values = settings.group_values * settings.groups
    assert (
        weights.flags.c_contiguous and weights.dtype == np.float32 and weights.size == rows.shape[1]
    )
    count = rows.size // values
    starts = np.array(settings.starts, np.float32)
    offsets = np.array(
        [
            number
            for pass_offsets in settings.scale_offsets
            for number in (len(pass_offsets), *pass_offsets)
        ],
        np.int32,
    )
    c_settings = _CSearchSettings(
        settings.group_values,
        settings.groups,
        *settings.levels,
        settings.max_minimum is not None,
        *(settings.scale_range or (0, 0)),
        settings.rounds,
        len(starts),
        len(settings.scale_offsets),
        settings.max_minimum or 0.0,
        settings.value_spread,
        starts.ctypes.data,
        offsets.ctypes.data,
    )
    levels, scales, mins = (
        np.empty((count, width), np.int16) for width in (values, settings.groups, settings.groups)
    )
    result = ScaleSearchResult(
        levels, np.empty(count, np.float32), np.empty(count, np.float32), scales, mins
    )
    inputs = rows.ctypes.data, weights.ctypes.data, count, weights.size // settings.group_values
    run(ctypes.addressof(c_settings), *inputs, *result.addresses)
    return result


def pack_blocks(result: ScaleSearchResult, name: str) -> "U8 | None":
    """Return a search result as blocks [blocks, bytes] of type `name`, packed by our C code. Return
    None if it is not installed.
    """
    import numpy as np

    run = c_function(f"pack_{_ggml_name(name)}", *_ROW_FUNCTION)
    if run is None:
        return None
    blocks = np.empty((len(result.d), block_size(name).nbytes), np.uint8)
    addresses = (ctypes.c_void_p * 5)(*result.addresses)
    run(ctypes.addressof(addresses), blocks.ctypes.data, len(blocks))
    return blocks


_ROW_FUNCTION = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64  # arguments: values, blocks, count


def _ggml_name(name: str) -> str:
    """Return a type's name as it is in ggml's function names: "q4_K" for "Q4_K"."""
    return name.lower().replace("_k", "_K")


@cache
def _encoder(name: str) -> Callable[..., None] | None:
    """Return our encoder of a type (encoders.c), or None if there is none, if it is not installed,
    or if it writes other bytes than the installed ggml. That happens where ggml was compiled with
    contracted multiply-adds, as on aarch64.
    """
    import numpy as np

    encoder = c_function(f"encode_{_ggml_name(name)}", *_ROW_FUNCTION)
    if encoder is None:
        return None
    shape = PROBE_ROWS, block_size(name).values
    rows = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    ours, theirs = (np.empty((PROBE_ROWS, row_bytes(name, shape[1])), np.uint8) for _ in range(2))
    encoder(rows.ctypes.data, ours.ctypes.data, rows.size)
    open_library().ggml_quantize_chunk(
        TYPE_NUMBERS[name], rows.ctypes.data, theirs.ctypes.data, 0, *shape, None
    )
    return encoder if np.array_equal(ours, theirs) else None


ENCODED_TYPES = ("Q4_K", "Q5_K", "Q6_K")  # the types of encoders.c


def has_encoders() -> bool:
    """Return whether our encoders (encoders.c) are installed and write the bytes of ggml."""
    return all(_encoder(name) is not None for name in ENCODED_TYPES)


def _check_limits(largest: float, importance: Importance | None, name: str, label: str) -> None:
    """Raise an error if values up to `largest`, or their squares times the importance, are above
    ggml's limits.
    """
    if largest > MAX_VALUE:
        raise _too_large(label, name)
    weight = float(importance.vectors.max(initial=0)) if importance else 0
    if not weight * largest**2 < MAX_WEIGHTED_SQUARE:
        raise UserError(
            f"the importance of {label} reaches {weight:.3g}: these are no mean squares",
            hint="make the imatrix again",
        )


def _too_large(label: str, name: str) -> DamagedSourceError:
    return DamagedSourceError(
        f"tensor {label} does not fit into {name}: a value is out of range",
        hint="choose BF16 or F32 instead",
    )


def _not_finite(label: str) -> DamagedSourceError:
    return DamagedSourceError(
        f"tensor {label} contains NaN or infinite values",
        hint="the source is damaged: download it again",
    )


def _to_float(name: str, label: str) -> Callable[..., None]:
    """Return the function that decodes a type other than F32 and F64. Raises UserError, with
    `label`, if there is none.
    """
    lib = open_library()
    if name == "F16":
        return c_function("widen", *_ROW_FUNCTION) or cast(
            "Callable[..., None]", lib.ggml_fp16_to_fp32_row
        )
    if name == "BF16":
        return cast("Callable[..., None]", lib.ggml_bf16_to_fp32_row)
    pointer = lib.ggml_get_type_traits(TYPE_NUMBERS[name])[0].to_float
    if not pointer:
        raise UserError(
            f"tensor {label} is stored as {name}, which cannot be converted to numbers",
            hint="use a file of another type",
        )
    return _ToFloat(pointer)
