"""llmcli's own bfloat16 products of many rows with quantized weights (gemm.c), if the build of
llama.cpp contains them.

They need a CPU with AVX512_BF16 and are up to 3.5 times as fast as ggml's for prompts. Their
results round differently from single rows, but less than ggml's 8-bit inputs do. K-quants, floats,
weights that ggml repacked, and everything with a GPU stay with ggml.

The setting applies to the whole process, because ggml asks a device, which has no access to
contexts.
"""

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UserError
from llmcli.runtime.binding.devices import free_gpu_bytes
from llmcli.runtime.binding.library import ggml

Floats = NDArray[np.float32]
GEMM_MODES = ("auto", "ggml")
# Minimum rows for a single conversation: a tile of flash attention (forward_pass.py), which rounds
# differently, too. Single tokens and drafts have fewer rows.
MIN_PROMPT_ROWS = 64
MIN_ANSWER_ROWS = 2  # minimum rows for many answers at once; each type has a minimum, too

_minimums: list[list[int]] = []  # one-element lists, compared by identity


def check_mode(mode: str) -> None:
    """Raise UserError for an unknown value of --gemm."""
    if mode not in GEMM_MODES:
        raise UserError(
            f"unknown --gemm mode {mode!r}", hint=f"--gemm takes {' or '.join(GEMM_MODES)}"
        )


def choose_min_rows(mode: str, answers: int, has_drafts: bool) -> int:
    """Return the minimum rows for own products, for this many answers at once, with or without
    drafts (`has_drafts`).
    """
    if mode == "ggml":
        return 0
    return MIN_ANSWER_ROWS if answers > 1 and not has_drafts else MIN_PROMPT_ROWS


def is_available() -> bool:
    """Return whether own products can be used here. With a GPU they are off: ggml would give it the
    large products, but not those of another device.
    """
    return _functions() is not None and free_gpu_bytes() is None


@contextmanager
def enabled(min_rows: int) -> Iterator[None]:
    """Compute products of at least this many rows with own kernels inside the block; 0 for none. Of
    nested blocks the newest counts. Contexts must be created inside the block.
    """
    minimum = [min_rows if min_rows and is_available() else 0]
    _minimums.append(minimum)
    _apply()
    try:
        yield
    finally:
        _minimums[:] = [other for other in _minimums if other is not minimum]
        _apply()


def _apply() -> None:
    """Register the device with ggml only while a block needs it, because a dry run counts its
    buffers, which belong to the CPU, twice.
    """
    library = _functions()
    if library is None:
        return
    library.llmcli_gemm_from(_minimums[-1][0] if _minimums else 0)
    is_used = any(minimum for (minimum,) in _minimums)
    register_or_unload = library.ggml_backend_register if is_used else library.ggml_backend_unload
    register_or_unload(library.llmcli_gemm())


def multiply(kind: int, blocks: NDArray[np.uint8], inputs: Floats, threads: int) -> Floats | None:
    """Return the products of inputs and quantized weights of a ggml type, or None when the type or
    this build is not supported.

    Shapes: blocks `[height, row_bytes]`, inputs `[rows, columns]`, result `[rows, height]`.
    """
    library = _functions()
    if library is None:
        return None
    (height, _), (count, columns) = blocks.shape, inputs.shape
    blocks, inputs = np.ascontiguousarray(blocks), np.ascontiguousarray(inputs)
    out = np.empty((count, height), np.float32)
    ok = library.llmcli_gemm_product(
        kind,
        blocks.ctypes.data,
        height,
        columns,
        inputs.ctypes.data,
        count,
        threads,
        out.ctypes.data,
    )
    return out if ok else None


@functools.cache
def _functions() -> Any:
    library = ggml()
    if not hasattr(library, "llmcli_gemm"):
        return None
    pointer, size, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.llmcli_gemm.restype, library.llmcli_gemm.argtypes = pointer, []
    library.llmcli_gemm_from.restype, library.llmcli_gemm_from.argtypes = None, [flag]
    library.llmcli_gemm_product.restype = flag
    library.llmcli_gemm_product.argtypes = [flag, pointer, size, size, pointer, size, flag, pointer]
    for function in (library.ggml_backend_register, library.ggml_backend_unload):
        function.restype, function.argtypes = None, [pointer]
    return library
