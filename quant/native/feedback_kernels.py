"""Our C code for the loops of GPTQ over the columns of a block (error_feedback.c). They take the
arrays of quant/methods/error_feedback.py, and do the same as the functions there.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from quant.native import ggml

if TYPE_CHECKING:
    from quant.native.ggml import F32

TILE_ROWS, MAX_COLUMNS, MAX_GROUP_COLUMNS = 32, 256, 32  # of error_feedback.c
_POINTER = ctypes.c_void_p
_ROUND_BLOCK = (*[_POINTER] * 4, ctypes.c_int64, *[_POINTER] * 4, ctypes.c_int64)
_MOVE_CODES = (*[_POINTER] * 4, ctypes.c_int64, _POINTER, ctypes.c_int64)
_REFIT_GROUPS = (*[_POINTER] * 4, ctypes.c_int64, *[_POINTER] * 4, ctypes.c_int64)


class _CGridLayout(ctypes.Structure):
    """`struct grid_layout` of error_feedback.c. The fields must have the same order."""

    _fields_ = (
        ("columns", ctypes.c_int32),
        ("group_columns", ctypes.c_int32),
        ("low", ctypes.c_int32),
        ("high", ctypes.c_int32),
        ("scale_low", ctypes.c_int32),
        ("scale_high", ctypes.c_int32),
        ("max_min", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class GridLayout:
    """The layout of a block: its columns, the columns of a group, and the ranges of levels, integer
    scales and integer minimums.
    """

    columns: int
    group_columns: int
    levels: tuple[int, int]
    scale_range: tuple[int, int] = (0, 0)
    max_min: int = 0

    def fits(self, rows: int) -> bool:
        """Return whether the C code takes blocks of this layout with so many rows."""
        return (
            rows % TILE_ROWS == 0
            and self.columns <= MAX_COLUMNS
            and self.group_columns <= MAX_GROUP_COLUMNS
        )


@cache
def _c_layout(layout: GridLayout) -> _CGridLayout:
    return _CGridLayout(
        layout.columns, layout.group_columns, *layout.levels, *layout.scale_range, layout.max_min
    )


def is_installed() -> bool:
    """Return whether the C code is installed."""
    return ggml.c_function("round_block", *_ROUND_BLOCK) is not None


def round_block(
    layout: GridLayout,
    weights: "F32",
    target: "F32",
    feed: "F32",
    step: "F32",
    minimum: "F32 | None",
    levels: "F32",
    errors: "F32",
) -> None:
    """Round the columns of a block one after another (_round_block)."""
    rows = _rows(layout, weights, target, levels, errors)
    _run("round_block", _ROUND_BLOCK)(
        *(_layout_address(layout), _address(weights), _address(target)),
        *_matrix(feed, layout),
        *(_address(step), _address(minimum), _address(levels), _address(errors), rows),
    )


def move_codes(
    layout: GridLayout, codes: "F32", gradient: "F32", block_moments: "F32", step: "F32"
) -> None:
    """Move each code of a block to the level with the lowest error (_move_codes)."""
    rows = _rows(layout, codes, gradient)
    _run("move_codes", _MOVE_CODES)(
        *(_layout_address(layout), _address(codes), _address(gradient)),
        *_matrix(block_moments, layout),
        *(_address(step), rows),
    )


def refit_groups(
    layout: GridLayout,
    codes: "F32",
    gradient: "F32",
    block_moments: "F32",
    scales: tuple["F32", "F32"],
    minimums: "tuple[F32, F32] | None",
) -> None:
    """Move each group's integers to the best ones (_refit_groups). `scales` are d and the integer
    scales, `minimums` m and the integer minimums; the integers are changed.
    """
    rows = _rows(layout, codes, gradient)
    d, integers = scales
    m, integer_minimums = minimums or (None, None)
    _run("refit_groups", _REFIT_GROUPS)(
        *(_layout_address(layout), _address(codes), _address(gradient)),
        *_matrix(block_moments, layout),
        *(_address(d), _address(m), _address(integers), _address(integer_minimums), rows),
    )


def _run(name: str, arguments: tuple[Any, ...]) -> Callable[..., None]:
    function = ggml.c_function(name, *arguments)
    assert function is not None, name
    return function


def _layout_address(layout: GridLayout) -> int:
    return ctypes.addressof(_c_layout(layout))


def _rows(layout: GridLayout, *panels: "F32") -> int:
    """Return the number of rows of contiguous panels [columns, rows], which must agree."""
    rows: int = panels[0].shape[1]
    assert layout.fits(rows), (layout, rows)
    assert all(panel.shape == (layout.columns, rows) for panel in panels), panels[0].shape
    return rows


def _address(array: "F32 | None") -> int | None:
    """Return the address of a contiguous float32 array."""
    if array is None:
        return None
    assert array.flags.c_contiguous and array.dtype.char == "f", (array.dtype, array.strides)
    return int(array.ctypes.data)


def _matrix(part: "F32", layout: GridLayout) -> tuple[int, int]:
    """Return the address of a part of a matrix, and the floats from one of its rows to the next."""
    assert part.shape == (layout.columns, layout.columns) and part.dtype.char == "f", part.shape
    assert part.strides[1] == part.itemsize, part.strides
    return int(part.ctypes.data), part.strides[0] // part.itemsize
