"""The one door to libggml: block sizes, encoding rows, decoding rows, through ctypes.

The library is the `libggml-base` that llama-cpp-python installs, found without importing llama_cpp,
so that no backend is initialised and the bytes are llama.cpp's own. It knows types and rows, no
files and no models.
"""

import ctypes
import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from quant.errors import Damaged, Refusal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    F32 = NDArray[np.float32]
    I16 = NDArray[np.int16]
    U8 = NDArray[np.uint8]

# ggml.h, enum ggml_type. The gguf package lags the runtime here, and the library aborts when it is
# asked about a number it does not know, so the table is ours; a test holds it against
# ggml_type_name().
TYPE_IDS: dict[int, str] = {
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
TYPE_NUMBERS = {name: number for number, name in TYPE_IDS.items()}
INTEGERS = frozenset({"I8", "I16", "I32", "I64"})
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
# What ggml's searches can add up: beyond these they meet infinity and NaN, on which some abort the
# process.
MOST = (
    2.0**30
)  # a value: more than any format with an F16 for a scale can hold (Q6_K: 65504 * 127 * 32)
MOST_WEIGHED = 1e30  # the square of a value times its importance
FP4 = frozenset({"MXFP4", "NVFP4"})  # no F16 and no search


@dataclass(frozen=True, slots=True)
class Block:
    """One type's block: `values` of a row are stored in `nbytes`."""

    values: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Importance:
    """How much each column counts in the rounding: `vectors` [matrices, columns], one for every
    `every` rows.

    Row 0 of the rows to encode is row `first` of those that the first vector is for.
    """

    vectors: "F32"
    every: int
    first: int = 0

    def behind(self, rows: int) -> "Importance":
        """The same for what comes behind the first `rows` rows."""
        return replace(self, first=self.first + rows)

    def spans(self, first: int, last: int) -> "Iterator[tuple[int, int, F32]]":
        """The rows first .. last in pieces that share a vector."""
        while first < last:
            number, within = divmod(self.first + first, self.every)
            end = min(last, first + self.every - within)
            yield first, end, self.vectors[number]
            first = end


@dataclass(frozen=True, slots=True)
class Searching:
    """How search() looks for scales, as quant/searches.c has it: `size` values of a group, `groups`
    of a block.

    `levels` are the lowest and the highest, `most` is what a minimum may be at most (None: no
    minimums), `whole` the range of whole-number scales (None: none); the rest is explained in
    quant/methods/grids.py.
    """

    size: int
    groups: int
    levels: tuple[int, int]
    most: float | None
    whole: tuple[int, int] | None
    spread: float
    starts: tuple[float, ...]
    rounds: int
    around: tuple[tuple[int, ...], ...]


class _Grid(ctypes.Structure):
    """`struct grid` of quant/searches.c."""

    _fields_ = [
        *(
            (name, ctypes.c_int32)
            for name in (
                "size",
                "groups",
                "low",
                "high",
                "least",
                "below",
                "above",
                "rounds",
                "starts",
                "looks",
            )
        ),
        ("most", ctypes.c_float),
        ("spread", ctypes.c_float),
        ("start", ctypes.c_void_p),
        ("around", ctypes.c_void_p),
    ]


@dataclass(frozen=True, slots=True)
class Found:
    """What search() found: levels around 0 [blocks, values], d and m [blocks], whole scales and
    minimums [blocks, groups]. What the format has not is undefined.
    """

    levels: "I16"
    d: "F32"
    m: "F32"
    scales: "I16"
    mins: "I16"

    @property
    def places(self) -> tuple[int, ...]:
        """Where they begin in memory."""
        return tuple(
            part.ctypes.data for part in (self.levels, self.d, self.m, self.scales, self.mins)
        )


class _Traits(ctypes.Structure):
    """The head of `struct ggml_type_traits` (ggml.h), as far as to_float."""

    _fields_ = [
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
    ]


_ToFloat = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


@cache
def library() -> ctypes.CDLL:
    """Open libggml-base; refuses, with the places searched, where llama-cpp-python is not
    installed.
    """
    spec = importlib.util.find_spec("llama_cpp")
    folders = (
        [Path(place) / "lib" for place in (spec.submodule_search_locations or [])] if spec else []
    )
    names = ("libggml-base.so", "libggml-base.dylib", "ggml-base.dll", "libggml-base.dll")
    for folder in folders:
        for name in names:
            if (folder / name).exists():
                return _declare(ctypes.CDLL(str(folder / name)))
    places = ", ".join(map(str, folders)) or "llama_cpp is not installed"
    raise Refusal(f"libggml-base was not found ({places})", hint="run scripts/setup")


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
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
    lib.ggml_get_type_traits.argtypes = [ctypes.c_int]
    lib.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
    probe = lib.ggml_get_type_traits(TYPE_NUMBERS["Q4_K"])[0]
    if (probe.type_name, probe.blck_size, probe.type_size, probe.is_quantized) != (
        b"q4_K",
        256,
        144,
        True,
    ):
        raise Refusal(
            "this llama-cpp-python keeps its type table in a form this program does not know",
            hint="run scripts/setup: it installs the version that fits",
        )
    return lib


@cache
def block(name: str) -> Block:
    """The block of a type: Q4_K is 256 values in 144 bytes."""
    traits = library().ggml_get_type_traits(TYPE_NUMBERS[name])[0]
    return Block(traits.blck_size, traits.type_size)


def row_bytes(name: str, columns: int) -> int:
    """Bytes of one row; `columns` must fill whole blocks."""
    shape = block(name)
    assert columns % shape.values == 0, (name, columns)
    return columns // shape.values * shape.nbytes


def quantized(name: str) -> bool:
    """Whether a type stores codes and scales rather than plain numbers."""
    return name not in FLOATS and name not in INTEGERS


def encode(rows: "F32", name: str, *, label: str, importance: Importance | None = None) -> "U8":
    """Encode float rows [rows, columns] into `name` -> bytes [rows, row_bytes].

    Rows are independent, and ctypes gives the interpreter lock back while ggml works: many threads
    may encode parts of a tensor at once. NaN, infinity and what is too large are refused by
    `label`, as ggml would write garbage for them, or abort. Follows llama_tensor_quantize_impl.
    Without an importance the types of encoders.c give ggml's bytes in a fraction of its time.
    """
    import numpy as np

    rows = np.ascontiguousarray(rows, dtype=np.float32)
    count, columns = rows.shape
    out = np.empty((count, row_bytes(name, columns)), np.uint8)
    number, lib = TYPE_NUMBERS[name], library()
    assert importance or not lib.ggml_quantize_requires_imatrix(number), (
        label,
        name,
    )  # ggml would abort
    check_rows(rows, name, label=label, importance=importance)
    if importance is None and (fast := _encoder(name)):
        fast(rows.ctypes.data, out.ctypes.data, rows.size)
    elif importance is None:
        lib.ggml_quantize_chunk(number, rows.ctypes.data, out.ctypes.data, 0, count, columns, None)
    else:
        for first, last, vector in importance.spans(0, count):
            assert vector.shape == (columns,) and vector.dtype == np.float32, (label, vector.shape)
            places = rows[first:last].ctypes.data, out[first:last].ctypes.data
            lib.ggml_quantize_chunk(number, *places, 0, last - first, columns, vector.ctypes.data)
    check_made(out, name, label=label)
    return out


def check_rows(rows: "F32", name: str, *, label: str, importance: Importance | None = None) -> None:
    """Refuse NaN, infinity and what is too large, by `label`, in float rows that are to be encoded
    into `name`.
    """
    largest = max(float(rows.max(initial=0)), -float(rows.min(initial=0)))
    if not math.isfinite(largest):
        raise _not_finite(label)
    if quantized(name) and name not in FP4:
        _check_sums(largest, importance, name, label)


def check_made(data: "U8", name: str, *, label: str) -> None:
    """Refuse, by `label`, rows that were encoded into `name` and whose scales have become infinite."""
    if not library().ggml_validate_row_data(TYPE_NUMBERS[name], data.ctypes.data, data.nbytes):
        raise _too_large(label, name)


def check(data: "U8", name: str, *, label: str) -> None:
    """Refuse NaN and infinity, by `label`, in rows [rows, row_bytes] that are copied as they are.

    Of quantized types it looks at what ggml's own check does: their scales.
    """
    import numpy as np

    data = np.ascontiguousarray(data)
    if name in ("F32", "F64"):
        sound = bool(np.isfinite(data.view(np.float32 if name == "F32" else np.float64)).all())
    elif name in ("F16", "BF16"):
        exponent = np.uint16(0x7C00 if name == "F16" else 0x7F80)
        sound = not bool(((data.view(np.uint16) & exponent) == exponent).any())
    else:
        sound = library().ggml_validate_row_data(TYPE_NUMBERS[name], data.ctypes.data, data.nbytes)
    if not sound:
        raise _not_finite(label)


def decode(data: "U8", name: str, columns: int, *, label: str) -> "F32":
    """Decode bytes [rows, row_bytes] of type `name` -> floats [rows, columns], by ggml's own
    routines.
    """
    import numpy as np

    if name == "F32":
        return data.view(np.float32).reshape(-1, columns)
    if name == "F64":
        return data.view(np.float64).reshape(-1, columns).astype(np.float32)
    data = np.ascontiguousarray(data).reshape(-1, row_bytes(name, columns))
    out = np.empty((len(data), columns), np.float32)
    _to_float(name, label)(data.ctypes.data, out.ctypes.data, out.size)
    return out


def decodable(name: str) -> bool:
    """Whether decode() can turn a type into numbers: not whole numbers, nor what ggml only computes
    with.
    """
    if name in FLOATS:
        return True
    return name not in INTEGERS and bool(
        library().ggml_get_type_traits(TYPE_NUMBERS[name])[0].to_float
    )


@cache
def _own(name: str, *arguments: Any) -> Callable[..., None] | None:
    """A function of our own C, where the build of llama.cpp has it."""
    function = getattr(library(), f"llmcli_{name}", None)
    if function is not None:
        function.argtypes, function.restype = arguments, None
    return cast("Callable[..., None] | None", function)


def searches() -> Callable[..., None] | None:
    """Our own search in C, where the build of llama.cpp has it."""
    return _own("search", *[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 5)


def search(rows: "F32", weights: "F32", how: Searching) -> Found:
    """Scales and levels for rows of floats; `weights` [blocks of a row, values] are the same for
    every row.
    """
    import numpy as np

    run, rows = searches(), np.ascontiguousarray(rows, np.float32)
    assert run is not None
    values = how.size * how.groups
    assert (
        weights.flags.c_contiguous and weights.dtype == np.float32 and weights.size == rows.shape[1]
    )
    count = rows.size // values
    starts = np.array(how.starts, np.float32)
    around = np.array([number for look in how.around for number in (len(look), *look)], np.int32)
    grid = _Grid(
        how.size,
        how.groups,
        *how.levels,
        how.most is not None,
        *(how.whole or (0, 0)),
        how.rounds,
        len(starts),
        len(how.around),
        how.most or 0.0,
        how.spread,
        starts.ctypes.data,
        around.ctypes.data,
    )
    levels, scales, mins = (
        np.empty((count, width), np.int16) for width in (values, how.groups, how.groups)
    )
    found = Found(levels, np.empty(count, np.float32), np.empty(count, np.float32), scales, mins)
    inputs = rows.ctypes.data, weights.ctypes.data, count, weights.size // how.size
    run(ctypes.addressof(grid), *inputs, *found.places)
    return found


def packed(found: Found, name: str) -> "U8 | None":
    """The same as blocks [blocks, bytes] of a type; None where the build has not our C for it."""
    import numpy as np

    run = _own(f"pack_{_spelled(name)}", *_THREE)
    if run is None:
        return None
    out = np.empty((len(found.d), block(name).nbytes), np.uint8)
    places = (ctypes.c_void_p * 5)(*found.places)
    run(ctypes.addressof(places), out.ctypes.data, len(out))
    return out


_THREE = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64  # (values, blocks, how many)


def _spelled(name: str) -> str:
    """A type as ggml's functions have it in their names: Q4_K is q4_K."""
    return name.lower().replace("_k", "_K")


def _encoder(name: str) -> Callable[..., None] | None:
    """Our own encoder for a type, where the build has it."""
    return _own(f"encode_{_spelled(name)}", *_THREE)


def _check_sums(largest: float, importance: Importance | None, name: str, label: str) -> None:
    if largest > MOST:
        raise _too_large(label, name)
    weight = float(importance.vectors.max(initial=0)) if importance else 0
    if not weight * largest**2 < MOST_WEIGHED:
        raise Refusal(
            f"the importance of {label} reaches {weight:.3g}: no mean squares",
            hint="make the imatrix again",
        )


def _too_large(label: str, name: str) -> Damaged:
    return Damaged(
        f"tensor {label} does not fit into {name}: a value is out of its range",
        hint="choose BF16 or F32 instead",
    )


def _not_finite(label: str) -> Damaged:
    return Damaged(
        f"tensor {label} holds NaN or infinite values", hint="the source is damaged: fetch it again"
    )


def _to_float(name: str, label: str) -> Callable[..., None]:
    lib = library()
    if name == "F16":
        return _own("widen", *_THREE) or cast("Callable[..., None]", lib.ggml_fp16_to_fp32_row)
    if name == "BF16":
        return cast("Callable[..., None]", lib.ggml_bf16_to_fp32_row)
    pointer = lib.ggml_get_type_traits(TYPE_NUMBERS[name])[0].to_float
    if not pointer:
        raise Refusal(
            f"tensor {label} is stored as {name}, which cannot be turned into numbers again",
            hint="use a file of another type",
        )
    return _ToFloat(pointer)
