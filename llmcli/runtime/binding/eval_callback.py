"""A callback that llama.cpp calls while it computes a graph (cb_eval, ggml-backend.h). It reads the
inputs of matrix products, from which importance matrices are collected.

llama.cpp calls it twice for each node of the graph: before the node is computed, to ask whether the
callback wants its data, and afterwards with the data. A node is a `struct ggml_tensor`.
"""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.binding.contract import TENSOR_TYPES
from llmcli.runtime.binding.ggml_tensor import MATMUL_OP, Tensor, declare_functions
from llmcli.runtime.binding.library import ggml, lib

# a product with fewer rows is not counted as a batch of text, as in tools/imatrix/imatrix.cpp
MIN_ROWS = 16
F32, I32 = TENSOR_TYPES["f32"], TENSOR_TYPES["i32"]
EXPERT_MATMUL_OP = b"MUL_MAT_ID"
FINAL_NORM = "result_norm"  # name of the tensor that most architectures multiply by the head
# names in build_attn_mha (src/llama-graph.cpp): the product of values and attention weights, and
# the attention weights
ATTENTION_PREFIX, WEIGHTS_PREFIX = b"kqv-", "kq_soft_max"


@dataclass(frozen=True, slots=True)
class ProductInput:
    """The input of one product of a weight with activations, as ProductWatcher passes it to its
    sink. The arrays are valid only during this call.

    - `name`: the name of the weight tensor.
    - `rows`: the activations `[i3, i2, rows, columns]`, or `[tokens, rows, columns]` with experts.
    - `matrices`: how many matrices the weight tensor has along its third and fourth dimension
      (ne[2], ne[3]).
    - `experts`: numbers of the chosen experts `[tokens, used]`, or None for a weight without
      experts.
    - `key`: identifies the activations (and the choice of experts). Products of one pass with equal
      keys have the same input.
    """

    name: str
    rows: NDArray[np.float32]
    matrices: tuple[int, int]
    experts: NDArray[np.int32] | None
    key: tuple[int, int]


@dataclass(frozen=True, slots=True)
class AttentionMix:
    """The attention weights of one layer, as ProductWatcher passes them to its sink. They are
    available only without flash attention. The array is valid only during this call.

    `name`: the name of the product of attention weights and values, such as "kqv-5". `shares`:
    `[heads, queries, keys]`; the keys are in the order of the cache's cells.
    """

    name: str
    shares: NDArray[np.float32]


class ProductWatcher:
    """Calls `sink` with the input of each matrix product whose weight name `is_wanted` accepts. For
    a product of attention weights and values, `is_wanted` gets the name of the product, and `sink`
    the attention weights. Products of fewer than MIN_ROWS rows are skipped.

    `callback` is the C function for the context, which must not outlive this object. C cannot pass
    on exceptions, so an exception in the sink ends the pass and is stored in `error`.

    The product with the weight `last_weight` ends the pass: later nodes are not computed, and the
    logits of the pass have no meaning. If this weight is known to be the head, the pass ends
    already when the input of the head is computed, because the head may be most of the work of a
    small model. When a graph is split over devices, the nodes on the other devices are still
    computed, but the sink is not called for them.
    """

    def __init__(
        self, is_wanted: Callable[[str], bool], sink: Callable[[ProductInput | AttentionMix], None]
    ) -> None:
        self.is_wanted, self.sink = is_wanted, sink
        self.last_weight = self.latest_weight = ""
        # numbers of matrices (ne[2], ne[3]) of each weight whose input is FINAL_NORM: such a weight
        # is a head
        self._heads: dict[str, tuple[int, int]] = {}
        self.error: BaseException | None = None
        self._functions = _functions()
        self._ops: dict[int, bytes] = {}
        self.callback = lib().ggml_backend_sched_eval_callback(self._callback)

    def narrow(self, is_wanted: Callable[[str], bool], last_weight: str) -> None:
        """Replace `is_wanted` for all later passes, and end each of these passes at the product
        with the weight `last_weight`.
        """
        self.is_wanted, self.last_weight = is_wanted, last_weight

    def check(self) -> None:
        """Raise the exception that ended the last pass in the sink, if there was one."""
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def _callback(self, pointer: int, ask: bool, _data: object) -> bool:
        """Handle a node, and store an exception instead of raising it through C."""
        try:
            return self._handle_node(pointer, ask)
        except BaseException as error:  # noqa: BLE001 - ctypes would print it and go on
            self.error = error
            return False

    def _handle_node(self, pointer: int, ask: bool) -> bool:
        """Handle a call of llama.cpp for the node at address `pointer`.

        With `ask`, return whether llama.cpp shall call again when the node is computed. Otherwise
        pass its data to the sink, and return whether the pass continues.
        """
        node = Tensor.from_address(pointer)
        if (
            self.last_weight in self._heads
            and node.ne[1] >= MIN_ROWS
            and _base_name(node.name) == FINAL_NORM
        ):
            return ask or self._end_at_head(pointer, node)
        op = self._ops.get(node.op)
        if op is None:
            op = self._ops[node.op] = self._functions.ggml_op_name(node.op)
        if op not in (MATMUL_OP, EXPERT_MATMUL_OP):
            return not ask
        weight, activations = Tensor.from_address(node.src[0]), Tensor.from_address(node.src[1])
        is_attention = (
            op == MATMUL_OP
            and node.name.startswith(ATTENTION_PREFIX)
            and _base_name(activations.name).startswith(WEIGHTS_PREFIX)
        )
        name = _base_name(node.name if is_attention else weight.name)
        if ask:
            has_min_rows = op == EXPERT_MATMUL_OP or activations.ne[1] >= MIN_ROWS
            return has_min_rows and activations.type == F32 and bool(name) and self.is_wanted(name)
        if is_attention:
            self.sink(AttentionMix(name, self._array(activations, np.float32)[0]))
            return name != self.last_weight
        ids = Tensor.from_address(node.src[2]) if op == EXPERT_MATMUL_OP else None
        self._report_product(name, weight, activations, ids, int(node.src[1]))
        return name != self.last_weight

    def _end_at_head(self, pointer: int, node: Tensor) -> bool:
        """Call the sink with the input of the head, the computed node `node`, and return False to
        end the pass.
        """
        self.latest_weight = self.last_weight
        rows = self._array(node, np.float32)
        self.sink(
            ProductInput(
                self.last_weight,
                rows,
                self._heads[self.last_weight],
                None,
                (pointer, int(node.data)),
            )
        )
        return False

    def _report_product(
        self, name: str, weight: Tensor, activations: Tensor, ids: Tensor | None, address: int
    ) -> None:
        """Call the sink with a computed product. `ids`: the tensor of chosen experts, or None.
        `address`: the address of the ggml_tensor `activations`.
        """
        rows = self._array(activations, np.float32)
        experts = None
        key = address, int(activations.data)
        self.latest_weight = name
        if ids is None and _base_name(activations.name) == FINAL_NORM:
            self._heads[name] = weight.ne[2], weight.ne[3]
        if ids is not None:
            assert ids.type == I32, ids.type
            experts, rows, key = (
                self._array(ids, np.int32)[0, 0],
                rows[0],
                (address, ctypes.addressof(ids)),
            )
        self.sink(ProductInput(name, rows, (weight.ne[2], weight.ne[3]), experts, key))

    def _array(self, tensor: Tensor, kind: Any) -> NDArray[Any]:
        """Return the data of a tensor as an array `[ne3, ne2, ne1, ne0]`. It is a view if the data
        is in host memory, and a copy otherwise.
        """
        functions = self._functions
        nbytes = functions.ggml_nbytes(ctypes.byref(tensor))
        if not tensor.buffer or functions.ggml_backend_buffer_is_host(tensor.buffer):
            buffer: Any = (ctypes.c_char * nbytes).from_address(tensor.data)
        else:
            buffer = ctypes.create_string_buffer(nbytes)
            functions.ggml_backend_tensor_get(ctypes.byref(tensor), buffer, 0, nbytes)
        return np.ndarray(tuple(tensor.ne)[::-1], kind, buffer, 0, tuple(tensor.nb)[::-1])


def _base_name(name: bytes) -> str:
    """Return the name of a tensor without the marks that llama.cpp adds to copies on other devices:
    `CUDA0#blk.0.attn_k.weight#0` is a copy of `blk.0.attn_k.weight`.
    """
    parts = name.split(b"#")
    return (parts[1] if len(parts) > 1 else name).decode("utf-8", "replace")


@functools.cache
def _functions() -> Any:
    """Return libggml with the types of its functions declared for ctypes."""
    library, pointer = ggml(), ctypes.c_void_p
    declare_functions(library)
    for name, result, arguments in (
        ("ggml_nbytes", ctypes.c_size_t, [pointer]),
        ("ggml_backend_buffer_is_host", ctypes.c_bool, [pointer]),
        ("ggml_backend_tensor_get", None, [pointer, pointer, ctypes.c_size_t, ctypes.c_size_t]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
