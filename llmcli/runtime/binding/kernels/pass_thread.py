"""llmcli's C thread that computes forward passes while Python code runs (pass_thread.c), if it is
installed.
"""

import ctypes
import functools
from typing import Any

from llmcli.runtime.binding.library import lib
from quant.native import kernels


@functools.cache
def load_library() -> Any | None:
    """Return the C library with the functions of pass_thread.c declared. Return None if it is not
    installed, or belongs to another version of llmcli or llama.cpp.
    """
    library = kernels.open_kernels().library
    return None if library is None else declare_functions(library)


def declare_functions(library: Any) -> Any | None:
    """Declare the functions of pass_thread.c in a ctypes library, and return it. Return None if the
    functions are missing, or if their llama_batch is not that of llama.cpp.
    """
    size = getattr(library, "llmcli_pass_batch_size", None)
    if size is None or size() != ctypes.sizeof(lib().llama_batch):
        return None
    pointer = ctypes.c_void_p
    for name, result, arguments in (
        ("start_pass_thread", pointer, [pointer, pointer]),
        ("begin_pass", None, [pointer, pointer]),
        ("end_pass", ctypes.c_int32, [pointer, pointer]),
        ("stop_pass_thread", None, [pointer]),
    ):
        function = getattr(library, f"llmcli_{name}")
        function.restype, function.argtypes = result, arguments
    return library


class PassFunctions(ctypes.Structure):
    """The addresses of llama.cpp's functions that pass_thread.c calls."""

    __slots__ = ()
    _fields_ = (("decode", ctypes.c_void_p), ("synchronize", ctypes.c_void_p))


class PassThread:
    """A thread that calls llama_decode for one context. It must be closed before the context is
    freed.
    """

    def __init__(self, library: Any, context: int) -> None:
        """`library`: the result of `load_library`. `context`: the address of the context.

        Raises OSError if the system gives no thread.
        """
        self._library, self._seconds = library, ctypes.c_double()
        functions = PassFunctions(
            ctypes.cast(lib().llama_decode, ctypes.c_void_p),
            ctypes.cast(lib().llama_synchronize, ctypes.c_void_p),
        )
        self._thread = library.llmcli_start_pass_thread(ctypes.addressof(functions), context)
        if not self._thread:
            raise OSError("the system gives no thread")

    def begin(self, batch: Any) -> None:
        """Start to compute a llama_batch, which must not change before `end`."""
        self._library.llmcli_begin_pass(self._thread, ctypes.addressof(batch))

    def end(self) -> tuple[int, float]:
        """Wait for the pass. Return the code of llama_decode, and the seconds that it took."""
        code = self._library.llmcli_end_pass(self._thread, ctypes.byref(self._seconds))
        return code, self._seconds.value

    def close(self) -> None:
        """Wait for a running pass, and end the thread."""
        thread, self._thread = self._thread, None
        if thread:
            self._library.llmcli_stop_pass_thread(thread)
