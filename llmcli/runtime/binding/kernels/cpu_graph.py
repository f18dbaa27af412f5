"""Small computations of ggml on the CPU, outside of any llama.cpp context: products with weights of
any type, in their file or in the layout of a loaded model.

ggml's own functions are called, so a product has the bits that llama.cpp computes for it. Python
owns the data of tensors, except for weights that are laid out anew.
"""

import ctypes
import functools
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UserError
from llmcli.runtime.binding.contract import HEADER_NUMBERS
from llmcli.runtime.binding.ggml_tensor import F32, InitParams, Tensor
from llmcli.runtime.binding.kernels import products
from llmcli.runtime.binding.library import ggml, registry_lock

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
CONTEXT_BYTES = 1 << 20  # of the descriptions of tensors and of a graph; ggml's default graph fits


class CpuGraph:
    """A computation that is described once and computed many times. Made by `open_graph`, and
    unusable after its `with` block.

    Tensors are addresses. Shapes are numpy's: `[rows, columns]`.
    """

    def __init__(self, context: int, backend: int) -> None:
        self._context, self._backend = context, backend
        self._graph = _functions().ggml_new_graph(context)
        # ggml knows only the addresses of the data
        self._data: dict[int, NDArray[Any]] = {}
        self._buffers: list[int] = []

    def weight(self, kind: int, columns: int, blocks: Bytes) -> int:
        """Return a tensor of stored weights. `kind`: their ggml type. `blocks`: the bytes of each
        row, `[rows, row_bytes]`, whose address is a multiple of 32.
        """
        assert blocks.flags.c_contiguous and blocks.ctypes.data % 32 == 0
        return self._make(kind, len(blocks), columns, blocks)

    def laid_out_weight(
        self, kind: int, columns: int, blocks: Bytes, own_types: Collection[str]
    ) -> int:
        """Return a tensor of weights in the layout that they have in a loaded model: llmcli's for
        `own_types`, else ggml's if it has one for this type, else that of the file. They are copied.
        """
        functions = _functions()
        buffer_type = products.repack_buffer_type() or functions.ggml_backend_cpu_buffer_type()
        tensor: int = functions.ggml_new_tensor_2d(self._context, kind, columns, len(blocks))
        with registry_lock:  # no model is loaded meanwhile with this choice
            products.choose_layout(own_types)
            buffer = functions.ggml_backend_buft_alloc_buffer(buffer_type, blocks.nbytes)
            if not buffer:
                raise UserError("there is no memory for weights", hint="close other programs")
            self._buffers.append(buffer)
            address = functions.ggml_backend_buffer_get_base(buffer)
            functions.ggml_backend_tensor_alloc(buffer, tensor, address)
        made = Tensor.from_address(tensor)
        if made.extra:
            functions.ggml_backend_tensor_set(tensor, blocks.ctypes.data, 0, blocks.nbytes)
        else:
            made.buffer = None
            ctypes.memmove(address, blocks.ctypes.data, blocks.nbytes)
        return tensor

    def free_weights(self) -> None:
        """Free the copies of weights."""
        while self._buffers:
            _functions().ggml_backend_buffer_free(self._buffers.pop())

    def values(self, values: Floats) -> int:
        """Return a tensor of floats, `[rows, columns]`. Later changes of the array are computed
        with.
        """
        assert values.flags.c_contiguous and values.dtype == np.float32
        rows, columns = values.shape
        return self._make(F32, rows, columns, values)

    def multiply(self, weight: int, inputs: int) -> int:
        """Return the products of the rows of `inputs` with the rows of a weight,
        `[rows of inputs, rows of weight]`.
        """
        return self._node(_functions().ggml_mul_mat(self._context, weight, inputs))

    def add(self, values: int, other: int) -> int:
        """Return the sum of two tensors. A single row of `other` is added to all rows."""
        return self._node(_functions().ggml_add(self._context, values, other))

    def silu(self, values: int) -> int:
        """Return x · sigmoid(x) of each value."""
        return self._node(_functions().ggml_silu(self._context, values))

    def relu(self, values: int) -> int:
        """Return max(x, 0) of each value."""
        return self._node(_functions().ggml_relu(self._context, values))

    def stack(self, values: int, below: int) -> int:
        """Return the rows of two tensors in one."""
        return self._node(_functions().ggml_concat(self._context, values, below, 1))

    def output(self, tensor: int) -> Floats:
        """Add a tensor to what is computed. Return the array in which its values are after each
        computation.
        """
        _functions().ggml_build_forward_expand(self._graph, tensor)
        return self._data[tensor]

    def compute(self) -> None:
        """Compute all outputs. Raises UserError if ggml fails."""
        if code := _functions().ggml_backend_graph_compute(self._backend, self._graph):
            raise UserError(
                f"ggml could not compute the heads of the draft (code {code})",
                hint="leave out -md",
            )

    def _make(self, kind: int, rows: int, columns: int, data: NDArray[Any]) -> int:
        tensor: int = _functions().ggml_new_tensor_2d(self._context, kind, columns, rows)
        return self._keep(tensor, data)

    def _node(self, tensor: int) -> int:
        """Give the result of an operation its memory."""
        columns, rows = Tensor.from_address(tensor).ne[:2]
        return self._keep(tensor, np.zeros((rows, columns), np.float32))

    def _keep(self, tensor: int, data: NDArray[Any]) -> int:
        Tensor.from_address(tensor).data = data.ctypes.data
        self._data[tensor] = data
        return tensor


@contextmanager
def open_graph(threads: int) -> Iterator[CpuGraph]:
    """Open an empty computation that runs on `threads` threads, and yield it."""
    functions = _functions()
    device = functions.ggml_backend_dev_by_type(HEADER_NUMBERS["GGML_BACKEND_DEVICE_TYPE_CPU"])
    backend = functions.ggml_backend_dev_init(device, None)
    set_threads = functions.ggml_backend_reg_get_proc_address(
        functions.ggml_backend_dev_backend_reg(device), b"ggml_backend_set_n_threads"
    )
    ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(set_threads)(backend, threads)
    context = functions.ggml_init(InitParams(CONTEXT_BYTES, None, True))
    graph = CpuGraph(context, backend)
    try:
        yield graph
    finally:
        graph.free_weights()
        functions.ggml_free(context)
        functions.ggml_backend_free(backend)


@functools.cache
def _functions() -> Any:
    """Return libggml as a ctypes library of its own, so that the declared types of its functions are
    those of this file.
    """
    library = ctypes.CDLL(ggml()._name)
    pointer, number = ctypes.c_void_p, ctypes.c_int
    for name, result, arguments in (
        ("ggml_add", pointer, [pointer, pointer, pointer]),
        ("ggml_backend_buffer_free", None, [pointer]),
        ("ggml_backend_buffer_get_base", pointer, [pointer]),
        ("ggml_backend_buft_alloc_buffer", pointer, [pointer, ctypes.c_size_t]),
        ("ggml_backend_cpu_buffer_type", pointer, []),
        ("ggml_backend_dev_backend_reg", pointer, [pointer]),
        ("ggml_backend_dev_by_type", pointer, [number]),
        ("ggml_backend_dev_init", pointer, [pointer, ctypes.c_char_p]),
        ("ggml_backend_free", None, [pointer]),
        ("ggml_backend_graph_compute", number, [pointer, pointer]),
        ("ggml_backend_reg_get_proc_address", pointer, [pointer, ctypes.c_char_p]),
        ("ggml_backend_tensor_alloc", number, [pointer, pointer, pointer]),
        (
            "ggml_backend_tensor_set",
            None,
            [pointer, pointer, ctypes.c_size_t, ctypes.c_size_t],
        ),
        ("ggml_build_forward_expand", None, [pointer, pointer]),
        ("ggml_concat", pointer, [pointer, pointer, pointer, number]),
        ("ggml_free", None, [pointer]),
        ("ggml_init", pointer, [InitParams]),
        ("ggml_mul_mat", pointer, [pointer, pointer, pointer]),
        ("ggml_new_graph", pointer, [pointer]),
        ("ggml_new_tensor_2d", pointer, [pointer, number, ctypes.c_int64, ctypes.c_int64]),
        ("ggml_relu", pointer, [pointer, pointer]),
        ("ggml_silu", pointer, [pointer, pointer]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
