"""llmcli's own matrix products of bfloat16 inputs with quantized weights (gemm.c), if they are
installed.

They need a CPU with AVX512_BF16, and are faster than ggml's products for prompts. Their rounding
differs from that of single rows, which ggml computes. It is more exact than ggml's, which rounds
inputs to 8 bits. ggml still computes k-quants, floats, weights that it has repacked, and everything
on a machine with a GPU.

A context uses them if it was created while they were registered with ggml (`registered`). From
how many rows of inputs is set before each of its passes: ggml asks, on the thread of the pass,
whether they compute a product, but not for which context.
"""

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UserError
from llmcli.runtime.binding import contract
from llmcli.runtime.binding.library import ggml, registry_lock
from llmcli.runtime.binding.placement.devices import has_gpu
from quant.native import kernels

Floats = NDArray[np.float32]
GEMM_MODES = ("auto", "ggml")
# Minimum rows of inputs for a single conversation: as many as flash attention computes in a tile
# (forward_pass.py), which also rounds differently from single rows. Passes with single tokens or
# drafts have fewer rows, so ggml computes them.
MIN_PROMPT_ROWS = 64
# minimum rows of inputs for several answers at once; gemm.c has a higher minimum for some types
MIN_ANSWER_ROWS = 2


def check_mode(mode: str) -> None:
    """Raise UserError for an unknown value of --gemm."""
    if mode not in GEMM_MODES:
        raise UserError(
            f"unknown --gemm mode {mode!r}", hint=f"--gemm takes {' or '.join(GEMM_MODES)}"
        )


def choose_min_rows(mode: str, answers: int, has_drafts: bool) -> int:
    """Return how many rows of inputs a product must have to be computed by llmcli's own code; 0 if
    ggml shall compute all products. `mode`: the value of --gemm. `answers`: how many answers are
    generated at once. `has_drafts`: whether tokens are drafted.
    """
    if mode == "ggml":
        return 0
    return MIN_ANSWER_ROWS if answers > 1 and not has_drafts else MIN_PROMPT_ROWS


def is_available() -> bool:
    """Return whether llmcli's own products can be used on this machine. They cannot on a machine
    with a GPU: ggml gives the GPU large products of weights in the CPU's buffers, but takes none
    from another device such as this one.
    """
    return not unusable_reason()


def unusable_reason() -> str:
    """Return why llmcli's own products cannot be used on this machine; "" if they can."""
    if _functions() is None:
        opened = kernels.open_gemm()
        if opened.library is None:
            return opened.problem
        needed = opened.library.llmcli_gemmggml_version().decode()
        return f"they need ggml {needed}, and llama.cpp has {ggml_version()}"
    return "ggml uses the GPU" if has_gpu() else ""


def ggml_version() -> str:
    """Return the version of the installed ggml; "unknown" for one that has no such function."""
    function = contract.optional_function(ggml(), contract.GGML_VERSION)
    if function is None:
        return "unknown"
    function.restype = ctypes.c_char_p
    return str(function().decode())


@contextmanager
def registered(min_rows: int) -> Iterator[Callable[[], None] | None]:
    """Let a context that is created inside the block use llmcli's own products for at least
    `min_rows` rows of inputs; 0 leaves all products to ggml. Yield the function to call before each
    of its passes, on the thread of the pass, or None if it does not use them. Contexts are created
    one at a time.

    llmcli's device is not registered outside, because other contexts would use it, and a dry run
    would count its buffers twice: they are those of the CPU.
    """
    with registry_lock:
        functions = _functions() if min_rows and is_available() else None
        if functions is None:
            yield None
            return
        begin_pass = functools.partial(functions.library.llmcli_gemm_from, min_rows)
        begin_pass()  # llama.cpp builds the graphs of the largest passes
        ggml().ggml_backend_register(functions.registry)
        try:
            yield begin_pass
        finally:
            ggml().ggml_backend_unload(functions.registry)


def multiply(kind: int, blocks: NDArray[np.uint8], inputs: Floats, threads: int) -> Floats | None:
    """Return the product of inputs with a quantized weight matrix. `kind`: the ggml type of the
    weights. Return None when the type is not supported, or when llmcli's own products are not
    installed.

    Shapes: blocks `[height, row_bytes]`, inputs `[rows, columns]`, result `[rows, height]`.
    """
    functions = _functions()
    if functions is None:
        return None
    (height, _), (count, columns) = blocks.shape, inputs.shape
    blocks, inputs = np.ascontiguousarray(blocks), np.ascontiguousarray(inputs)
    out = np.empty((count, height), np.float32)
    ok = functions.library.llmcli_gemm_product(
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


class _Functions(NamedTuple):
    library: ctypes.CDLL  # the functions of gemm.c
    registry: int  # address of the backend's registry, for ggml


# the functions of ggml that gemm.c calls, in the order of `struct ggml_functions`
GGML_FUNCTIONS = (
    "ggml_is_contiguous",
    "ggml_backend_buft_is_host",
    "ggml_backend_cpu_buffer_type",
    "ggml_backend_cpu_buffer_from_ptr",
)


@functools.cache
def _functions() -> _Functions | None:
    """Return the functions of gemm.c with their types declared, or None if they are not installed
    or are for another version of ggml, whose structures may differ.
    """
    library = kernels.open_gemm().library
    if library is None:
        return None
    pointer, size, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.llmcli_gemm_ggml_version.restype = ctypes.c_char_p
    library.llmcli_gemm.restype, library.llmcli_gemm.argtypes = pointer, [pointer]
    library.llmcli_gemm_from.restype, library.llmcli_gemm_from.argtypes = None, [flag]
    library.llmcli_gemm_product.restype = flag
    library.llmcli_gemm_product.argtypes = [flag, pointer, size, size, pointer, size, flag, pointer]
    if library.llmcli_gemmggml_version().decode() != ggml_version():
        return None
    for function in (ggml().ggml_backend_register, ggml().ggml_backend_unload):
        function.restype, function.argtypes = None, [pointer]
    addresses = (ctypes.cast(getattr(ggml(), name), pointer).value for name in GGML_FUNCTIONS)
    table = (pointer * len(GGML_FUNCTIONS))(*addresses)
    return _Functions(library, library.llmcli_gemm(ctypes.addressof(table)))
