"""Matrix products of llmcli's own inside of ggml's CPU backend (products.c), if they are installed.

llama.cpp asks the buffer type CPU_REPACK of ggml which weights it keeps in a layout for its kernels
(ggml/src/ggml-cpu/repack.cpp). With llmcli's layout these are all quantized matrices of the types
in products.c with a multiple of eight rows, in place of the few types for which ggml has a layout.
The bytes are as many as those in the file, and a product of a row of inputs has the same bits
however many rows are computed with it.
"""

import ctypes
import functools
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.binding import contract
from llmcli.runtime.binding.kernels import gemm
from llmcli.runtime.binding.library import ggml
from quant.native import kernels
from quant.native.ggml import TYPE_NUMBERS

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
# the types of weights that products.c multiplies
TYPES = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"),
)
# the functions of ggml-cpu that products.c calls, in the order of `struct cpu_functions`
GGML_CPU_FUNCTIONS = (contract.BARRIER, contract.CHUNK_SET, contract.CHUNK_ADD)


def is_available() -> bool:
    """Return whether llmcli's own products can be used on this machine."""
    return not unusable_reason()


def unusable_reason() -> str:
    """Return why llmcli's own products cannot be used on this machine; "" if they can."""
    opened = kernels.open_products()
    if opened.library is None:
        return opened.problem
    if _functions() is None:
        needed = opened.library.llmcli_products_ggml_version().decode()
        found = gemm.ggml_version()
        if needed != found:
            return f"they need ggml {needed}, and llama.cpp has {found}"
        return "llama.cpp was built without a layout of weights for the CPU"
    return ""


def library_name() -> str:
    """Return the name of the library of products for this CPU, which says its instructions."""
    return kernels.open_products().name


def choose_layout(own_types: Collection[str]) -> None:
    """Let weights of `own_types`, some of TYPES, have the layout of llmcli's products in the models
    that are loaded from now on, and all others that of ggml. The caller loads one model at a time
    (library.registry_lock). Models that are loaded keep theirs.
    """
    functions = _functions()
    if functions is not None:
        mask = sum(1 << TYPE_NUMBERS[name] for name in own_types)
        functions.library.llmcli_products_install(functions.buffer_type, functions.table, mask)


def use_attention(*, own: bool) -> bool:
    """Let llmcli compute attention from now on (attention.c), or ggml, for all models of the
    process. Return whether llmcli did so before. It does if this is never called.
    """
    functions = _functions()
    return functions is not None and bool(functions.library.llmcli_products_use_attention(own))


@contextmanager
def attention_of_ggml() -> Iterator[None]:
    """Let ggml compute attention within the block, for all models of the process."""
    before = use_attention(own=False)
    try:
        yield
    finally:
        use_attention(own=before)


def leaves_attention_to_ggml() -> bool:
    """Return whether ggml has computed the attention of a single token with flash attention in this
    process. ggml's result depends on the number of threads, llmcli's does not.
    """
    functions = _functions()
    return functions is None or bool(functions.library.llmcli_products_leave_attention())


def repack_buffer_type() -> int | None:
    """Return the address of ggml's buffer type for weights in a layout of their own, or None if it
    is unknown.
    """
    functions = _functions()
    return functions.buffer_type if functions is not None else None


def multiply(kind: int, blocks: Bytes, inputs: Floats) -> Floats | None:
    """Return the product of inputs with a quantized weight matrix, computed by one thread. `kind`:
    the ggml type of the weights. Return None when the type or the shape is not supported, or when
    llmcli's own products are not installed.

    Shapes: blocks `[height, row_bytes]`, inputs `[rows, columns]`, result `[rows, height]`.
    """
    opened = kernels.open_products()
    if opened.library is None:
        return None
    library = _declare(opened.library)
    (height, row_bytes), (count, columns) = blocks.shape, inputs.shape
    blocks, inputs = np.ascontiguousarray(blocks), np.ascontiguousarray(inputs)
    interleaved, out = np.empty_like(blocks), np.empty((count, height), np.float32)
    ok = library.llmcli_products_interleave(
        kind, blocks.ctypes.data, height, row_bytes, interleaved.ctypes.data
    ) and library.llmcli_products_multiply(
        kind,
        interleaved.ctypes.data,
        height,
        row_bytes,
        columns,
        inputs.ctypes.data,
        count,
        out.ctypes.data,
    )
    return out if ok else None


class _Functions(NamedTuple):
    library: ctypes.CDLL  # the functions of products.c
    buffer_type: int  # address of the buffer type CPU_REPACK
    table: int  # address of the functions of ggml


@functools.cache
def _functions() -> _Functions | None:
    """Return what `choose_layout` needs, or None if the products are not installed, or if they are
    for another version of ggml, whose structures may differ.
    """
    opened = kernels.open_products()
    if opened.library is None:
        return None
    library = _declare(opened.library)
    if library.llmcli_products_ggml_version().decode() != gemm.ggml_version():
        return None
    buffer_type = contract.optional_function(ggml(), contract.REPACK_BUFFER_TYPE)
    found = [contract.optional_function(ggml(), symbol) for symbol in GGML_CPU_FUNCTIONS]
    if buffer_type is None or None in found:
        return None
    buffer_type.restype = ctypes.c_void_p
    functions = [ggml().ggml_backend_buft_is_host, ggml().ggml_backend_cpu_buffer_type, *found]
    pointers = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
    table = (ctypes.c_void_p * len(pointers))(*pointers)
    _tables.append(table)
    return _Functions(library, buffer_type(), ctypes.addressof(table))


_tables: list[ctypes.Array[ctypes.c_void_p]] = []  # that C has pointers to


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the types of the functions of products.c."""
    pointer, size, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.llmcli_products_ggml_version.restype = ctypes.c_char_p
    library.llmcli_products_install.restype = None
    library.llmcli_products_install.argtypes = [pointer, pointer, ctypes.c_uint64]
    library.llmcli_products_leave_attention.restype = flag
    library.llmcli_products_use_attention.restype = flag
    library.llmcli_products_use_attention.argtypes = [flag]
    library.llmcli_products_interleave.argtypes = [flag, pointer, size, size, pointer]
    library.llmcli_products_multiply.argtypes = [
        *(flag, pointer, size, size, size),
        *(pointer, size, pointer),
    ]
    return library
