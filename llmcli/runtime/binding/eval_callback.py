"""A context's eval callback (ggml-backend.h), which reads the inputs of products while a graph is
computed.

llama.cpp calls it twice for a node: before the node is computed, to ask whether the callback wants
to see it, and afterwards. A node is a `struct ggml_tensor`. The Python class that mirrors this
struct is checked against the library before it is used.
"""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UserError
from llmcli.runtime.binding.library import ggml, lib

# a product with fewer rows is not counted as a batch of text, as in tools/imatrix/imatrix.cpp
MIN_ROWS = 16
F32, I32 = 0, 26  # enum ggml_type
MATMUL_OP, EXPERT_MATMUL_OP = b"MUL_MAT", b"MUL_MAT_ID"
FINAL_NORM = "result_norm"  # name of the tensor that most architectures multiply by the head
MIX_PREFIX, WEIGHTS_PREFIX = (
    b"kqv-",
    "kq_soft_max",
)  # name of the product of values and attention weights in build_attn_mha (src/llama-graph.cpp)
OBJECT_BYTES = 32  # bytes of a struct ggml_object


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    ]


class _InitParams(ctypes.Structure):
    _fields_ = [
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    ]


@dataclass(frozen=True, slots=True)
class ProductInput:
    """The input of a product with a weight. Valid only during the call of the sink.

    - `name`: the name of the weight. `matrices`: how many matrices it has (ne[2], ne[3]).
    - `rows`: the input `[i3, i2, rows, columns]`.
    - `experts`: numbers of the chosen experts `[tokens, used]`, or None.
    - `key`: identifies the input (and its experts). Products of one pass with the same key have the
      same input.
    """

    name: str
    rows: NDArray[np.float32]
    matrices: tuple[int, int]
    experts: NDArray[np.int32] | None
    key: tuple[int, int]


@dataclass(frozen=True, slots=True)
class AttentionMix:
    """The attention weights of one layer, available only without flash attention. Valid only during
    the call of the sink.

    `name`: the name of the product with the values, such as "kqv-5". `shares`: `[heads, queries,
    keys]`; keys are in the order of the cache's cells.
    """

    name: str
    shares: NDArray[np.float32]


class ProductWatcher:
    """Calls `sink` for each product with a wanted weight, and for the attention weights of each
    wanted product. `is_wanted` decides by name.

    `callback` is the function for the context, which must not outlive this object. C cannot pass on
    exceptions, so an exception in the sink ends the pass and is stored in `error`.

    The product with the weight `last_weight` ends the pass: later nodes are not computed, and the
    logits of the pass have no meaning. If the weight is known to be the head, the pass ends before
    the product, because its input is complete then; for a small model the head may be most of the
    work. When a graph is split over devices, each later part is still computed, but without calls
    of the sink.
    """

    def __init__(
        self, is_wanted: Callable[[str], bool], sink: Callable[[ProductInput | AttentionMix], None]
    ) -> None:
        self.is_wanted, self.sink = is_wanted, sink
        self.last_weight = self.latest_weight = ""
        self._heads: dict[
            str, tuple[int, int]
        ] = {}  # number of matrices of each weight whose input is FINAL_NORM, which makes it a head
        self.error: BaseException | None = None
        self._functions = _functions()
        self._ops: dict[int, bytes] = {}
        self.callback = lib().ggml_backend_sched_eval_callback(self._node)

    def narrow(self, is_wanted: Callable[[str], bool], last_weight: str) -> None:
        """From now on call the sink only for weights that `is_wanted` accepts, and end every pass
        at the product with `last_weight`.
        """
        self.is_wanted, self.last_weight = is_wanted, last_weight

    def check(self) -> None:
        """Raise the exception that the sink raised, if any."""
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def _node(self, pointer: int, ask: bool, _data: object) -> bool:
        try:
            return self._look(pointer, ask)
        except BaseException as error:  # noqa: BLE001 - ctypes would print it and go on
            self.error = error
            return False

    def _look(self, pointer: int, ask: bool) -> bool:
        node = _Tensor.from_address(pointer)
        if (
            self.last_weight in self._heads
            and node.ne[1] >= MIN_ROWS
            and _plain(node.name) == FINAL_NORM
        ):
            return ask or self._end(pointer, node)
        op = self._ops.get(node.op)
        if op is None:
            op = self._ops[node.op] = self._functions.ggml_op_name(node.op)
        if op not in (MATMUL_OP, EXPERT_MATMUL_OP):
            return not ask
        weight, entered = _Tensor.from_address(node.src[0]), _Tensor.from_address(node.src[1])
        mixes = (
            op == MATMUL_OP
            and node.name.startswith(MIX_PREFIX)
            and _plain(entered.name).startswith(WEIGHTS_PREFIX)
        )
        name = _plain(node.name if mixes else weight.name)
        if ask:
            enough = op == EXPERT_MATMUL_OP or entered.ne[1] >= MIN_ROWS
            return enough and entered.type == F32 and bool(name) and self.is_wanted(name)
        if mixes:
            self.sink(AttentionMix(name, self._array(entered, np.float32)[0]))
            return name != self.last_weight
        ids = _Tensor.from_address(node.src[2]) if op == EXPERT_MATMUL_OP else None
        self._show(name, weight, entered, ids, int(node.src[1]))
        return name != self.last_weight

    def _end(self, pointer: int, node: _Tensor) -> bool:
        """Call the sink with the input of the head, and end the pass."""
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

    def _show(
        self, name: str, weight: _Tensor, entered: _Tensor, ids: _Tensor | None, address: int
    ) -> None:
        rows = self._array(entered, np.float32)
        experts = None
        key = address, int(entered.data)
        self.latest_weight = name
        if ids is None and _plain(entered.name) == FINAL_NORM:
            self._heads[name] = weight.ne[2], weight.ne[3]
        if ids is not None:
            assert ids.type == I32, ids.type
            experts, rows, key = (
                self._array(ids, np.int32)[0, 0],
                rows[0],
                (address, ctypes.addressof(ids)),
            )
        self.sink(ProductInput(name, rows, (weight.ne[2], weight.ne[3]), experts, key))

    def _array(self, tensor: _Tensor, kind: Any) -> NDArray[Any]:
        """Return the values of a tensor, `[ne3, ne2, ne1, ne0]`: a view if they are in host memory,
        otherwise a copy.
        """
        functions = self._functions
        nbytes = functions.ggml_nbytes(ctypes.byref(tensor))
        if not tensor.buffer or functions.ggml_backend_buffer_is_host(tensor.buffer):
            buffer: Any = (ctypes.c_char * nbytes).from_address(tensor.data)
        else:
            buffer = ctypes.create_string_buffer(nbytes)
            functions.ggml_backend_tensor_get(ctypes.byref(tensor), buffer, 0, nbytes)
        return np.ndarray(tuple(tensor.ne)[::-1], kind, buffer, 0, tuple(tensor.nb)[::-1])


def _plain(name: bytes) -> str:
    """Return a tensor name without llama.cpp's copy marks: `CUDA0#blk.0.attn_k.weight#0` is a copy
    of `blk.0.attn_k.weight`.
    """
    parts = name.split(b"#")
    return (parts[1] if len(parts) > 1 else name).decode("utf-8", "replace")


@functools.cache
def _functions() -> Any:
    """Return libggml, after checking that its tensors have the layout of the Python mirror.

    Raises UserError if they have another layout.
    """
    library, pointer = ggml(), ctypes.c_void_p
    for name, result, arguments in (
        ("ggml_tensor_overhead", ctypes.c_size_t, []),
        ("ggml_init", pointer, [_InitParams]),
        ("ggml_free", None, [pointer]),
        ("ggml_new_tensor_2d", pointer, [pointer, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]),
        ("ggml_set_name", pointer, [pointer, ctypes.c_char_p]),
        ("ggml_mul_mat", pointer, [pointer, pointer, pointer]),
        ("ggml_op_name", ctypes.c_char_p, [ctypes.c_int]),
        ("ggml_nbytes", ctypes.c_size_t, [pointer]),
        ("ggml_backend_buffer_is_host", ctypes.c_bool, [pointer]),
        ("ggml_backend_tensor_get", None, [pointer, pointer, ctypes.c_size_t, ctypes.c_size_t]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    if library.ggml_tensor_overhead() != ctypes.sizeof(_Tensor) + OBJECT_BYTES or not _reads(
        library
    ):
        raise UserError(
            "this version of llama-cpp-python has an unknown tensor layout",
            hint="run scripts/setup to install a version that works with llmcli",
        )
    return library


def _reads(library: Any) -> bool:
    """Return whether the Python mirror reads a product of two empty matrices correctly."""
    context = library.ggml_init(_InitParams(1 << 16, None, True))
    try:
        weight, entered = (library.ggml_new_tensor_2d(context, F32, 8, rows) for rows in (3, 5))
        library.ggml_set_name(weight, b"some.weight")
        node = _Tensor.from_address(library.ggml_mul_mat(context, weight, entered))
        mirror = _Tensor.from_address(node.src[0])
        return (
            library.ggml_op_name(node.op) == MATMUL_OP
            and tuple(node.ne) == (3, 5, 1, 1)
            and node.src[1] == entered
            and mirror.name == b"some.weight"
            and tuple(mirror.nb) == (4, 32, 96, 96)
            and mirror.type == F32
        )
    finally:
        library.ggml_free(context)
