"""llmcli's own products of many bfloat16 rows with quantized weights (gemm.c), available if the
build of llama.cpp contains them.

They need a CPU with AVX512_BF16, and for prompts they are up to 3.5 times as fast as ggml's.
Results differ from those of single rows by rounding, but less than ggml's results do, which come
from 8-bit inputs. ggml still computes k-quants, floats, weights that it has repacked, and
everything on a machine with a GPU.

The setting applies to the whole process, because ggml asks a device whether it computes a product,
and a device has no access to contexts.
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
# Minimum rows for a single conversation: as many as a tile of flash attention (forward_pass.py),
# which also rounds differently. Single tokens and drafts have fewer rows, so they do not change.
MIN_PROMPT_ROWS = 64
# minimum rows for several answers at once; each type of weights also has a minimum
MIN_ANSWER_ROWS = 2

# the minimum rows of each open block, in lists of one element so that blocks are compared by
# identity
_minimums: list[list[int]] = []


def check_mode(mode: str) -> None:
    """Raise UserError for an unknown value of --gemm."""
    if mode not in GEMM_MODES:
        raise UserError(
            f"unknown --gemm mode {mode!r}", hint=f"--gemm takes {' or '.join(GEMM_MODES)}"
        )


def choose_min_rows(mode: str, answers: int, has_drafts: bool) -> int:
    """Return the minimum rows of a product for own kernels; 0 for no own kernels. `answers`:
    answers at once. `has_drafts`: whether tokens are drafted.
    """
    if mode == "ggml":
        return 0
    return MIN_ANSWER_ROWS if answers > 1 and not has_drafts else MIN_PROMPT_ROWS


def is_available() -> bool:
    """Return whether own products can be used on this machine. With a GPU they are off: ggml gives
    the GPU large products of weights in the CPU's buffers, but not those of another device such as
    this one.
    """
    return _functions() is not None and free_gpu_bytes() is None


@contextmanager
def enabled(min_rows: int) -> Iterator[None]:
    """Use own kernels for products of at least this many rows inside the block; 0 uses none. In
    nested blocks the innermost setting applies. Contexts must be created inside the block.
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
    """Register the device of own products with ggml if a block uses it, otherwise unload it. It is
    not always registered, because a dry run would count its buffers twice: they belong to the CPU.
    """
    library = _functions()
    if library is None:
        return
    library.llmcli_gemm_from(_minimums[-1][0] if _minimums else 0)
    is_used = any(minimum for (minimum,) in _minimums)
    register_or_unload = library.ggml_backend_register if is_used else library.ggml_backend_unload
    register_or_unload(library.llmcli_gemm())


def multiply(kind: int, blocks: NDArray[np.uint8], inputs: Floats, threads: int) -> Floats | None:
    """Return the products of inputs with quantized weights. `kind`: the ggml type of the weights.
    Return None when the type is not supported or the build does not contain own products.

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
