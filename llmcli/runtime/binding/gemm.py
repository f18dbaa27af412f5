"""Our own products of many rows with quantized weights (gemm.c), where the build of llama.cpp has
them.

They are the processor's own bfloat16, so that is all CPUs with AVX512_BF16. SmolLM2-135M on two
cores of an EPYC: a prompt of 512 tokens 3.5 times as fast in Q4_1 as by ggml, 2.2 times in Q5_0 and
1.8 in Q8_0; sixteen answers at once 2.8, 1.7 and 1.5 times (scripts/measure_gemm.py, 2026-11-23).
Rows round otherwise than one by one, less than ggml's inputs of 8 bits do. k-quants and floats are
ggml's, and so is what it has laid out anew, and all with a GPU.

The switch is one for the whole process: ggml asks a device, which knows no contexts.
"""

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UserError
from llmcli.runtime.binding.devices import gpu_free
from llmcli.runtime.binding.library import ggml

Floats = NDArray[np.float32]
MODES = ("auto", "ggml")
# Rows from which on one conversation's are: as many as flash attention's tiles have (passes.py),
# which round otherwise, too. Guesses that are looked at have fewer, and a token has one.
PROMPTS = 64
ANSWERS = 2  # the same where many are answered at once; each type has its own least, too

_wishes: list[list[int]] = []  # each told from the others by where it lies


def check(mode: str) -> None:
    """Raise UserError for a word that --gemm does not take."""
    if mode not in MODES:
        raise UserError(
            f"unknown way to multiply {mode!r}", hint=f"--gemm takes {' or '.join(MODES)}"
        )


def rows(mode: str, answers: int, guesses: bool) -> int:
    """For used(): rows from which on products are our own, for so many answers at once, with or
    without `guesses`.
    """
    if mode == "ggml":
        return 0
    return ANSWERS if answers > 1 and not guesses else PROMPTS


def known() -> bool:
    """Whether products may be our own here. With a GPU none are: ggml gives it what is large, but
    not what another device takes.
    """
    return _functions() is not None and gpu_free() is None


@contextmanager
def used(least: int) -> Iterator[None]:
    """Meanwhile compute products of so many rows and more, 0: none; of several that hold the newest
    counts. Contexts must be made within it.
    """
    wish = [least if least and known() else 0]
    _wishes.append(wish)
    _apply()
    try:
        yield
    finally:
        _wishes[:] = [other for other in _wishes if other is not wish]
        _apply()


def _apply() -> None:
    """Let ggml know of the device while somebody wishes for it: a dry run counts its buffers, which
    are the CPU's, once more.
    """
    library = _functions()
    if library is None:
        return
    library.llmcli_gemm_from(_wishes[-1][0] if _wishes else 0)
    wished = any(wish for (wish,) in _wishes)
    tell = library.ggml_backend_register if wished else library.ggml_backend_unload
    tell(library.llmcli_gemm())


def product(kind: int, blocks: NDArray[np.uint8], inputs: Floats, threads: int) -> Floats | None:
    """Products [rows, height] of inputs [rows, columns] and quantized weights [height, row_bytes]
    of a ggml type; None where there is none of this type, or of this build.
    """
    library = _functions()
    if library is None:
        return None
    (height, _), (count, columns) = blocks.shape, inputs.shape
    blocks, inputs = np.ascontiguousarray(blocks), np.ascontiguousarray(inputs)
    out = np.empty((count, height), np.float32)
    made = library.llmcli_gemm_product(
        kind,
        blocks.ctypes.data,
        height,
        columns,
        inputs.ctypes.data,
        count,
        threads,
        out.ctypes.data,
    )
    return out if made else None


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
