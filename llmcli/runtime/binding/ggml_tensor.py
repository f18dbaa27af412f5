"""The structures of ggml that are read in memory: tensors and their parameters. ggml does not
promise their layout, so `layout_difference` compares it with a tensor that the library made.
"""

import ctypes
from typing import Any

MATMUL_OP = b"MUL_MAT"
OBJECT_BYTES = 32  # bytes of a struct ggml_object, which ggml_tensor_overhead counts
F32 = 0  # enum ggml_type


class Tensor(ctypes.Structure):
    """The Python mirror of `struct ggml_tensor` (ggml.h)."""

    __slots__ = ()  # so that other attributes are refused
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


class InitParams(ctypes.Structure):
    """The Python mirror of `struct ggml_init_params` (ggml.h)."""

    __slots__ = ()
    _fields_ = [
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    ]


def layout_difference(library: Any) -> str:
    """Return in words how libggml's tensors differ from `Tensor`; "" if they do not.

    `library`: libggml as a ctypes library. The types of the functions that are called here are
    declared.
    """
    declare_functions(library)
    nbytes = library.ggml_tensor_overhead() - OBJECT_BYTES
    if nbytes != ctypes.sizeof(Tensor):
        return f"a ggml_tensor has {nbytes} bytes instead of {ctypes.sizeof(Tensor)}"
    context = library.ggml_init(InitParams(1 << 13, None, True))
    try:
        weight, activations = (library.ggml_new_tensor_2d(context, F32, 8, rows) for rows in (3, 5))
        library.ggml_set_name(weight, b"some.weight")
        node = Tensor.from_address(library.ggml_mul_mat(context, weight, activations))
        mirror = Tensor.from_address(node.src[0] or weight)
        is_same = (
            library.ggml_op_name(node.op) == MATMUL_OP
            and tuple(node.ne) == (3, 5, 1, 1)
            and node.src[0] == weight
            and node.src[1] == activations
            and mirror.name == b"some.weight"
            and tuple(mirror.nb) == (4, 32, 96, 96)
            and mirror.type == F32
        )
    finally:
        library.ggml_free(context)
    return "" if is_same else "the fields of a ggml_tensor are in other places"


def declare_functions(library: Any) -> None:
    """Declare the types of libggml's functions that make and describe tensors."""
    pointer = ctypes.c_void_p
    for name, result, arguments in (
        ("ggml_tensor_overhead", ctypes.c_size_t, []),
        ("ggml_init", pointer, [InitParams]),
        ("ggml_free", None, [pointer]),
        ("ggml_new_tensor_2d", pointer, [pointer, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]),
        ("ggml_set_name", pointer, [pointer, ctypes.c_char_p]),
        ("ggml_mul_mat", pointer, [pointer, pointer, pointer]),
        ("ggml_op_name", ctypes.c_char_p, [ctypes.c_int]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
