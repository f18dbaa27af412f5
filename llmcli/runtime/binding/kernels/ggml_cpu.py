"""ggml's library for the CPU. llmcli uses its vectorized softmax, which is exported although it is
not in the headers, and OpenMP's function for running work on ggml's threads, which is found through
this library.
"""

import ctypes
import functools
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LIBRARY_NAMES = {"linux": ("libggml-cpu.so",), "darwin": ("libggml-cpu.dylib", "libggml-cpu.so")}
RUN_PARALLEL = "GOMP_parallel"  # GCC's OpenMP and LLVM's both have it


@functools.cache
def load_ggml_cpu() -> Any | None:
    """Return the library, or None if this build of ggml has none of its own for the CPU."""
    spec = find_spec("llama_cpp")
    assert spec and spec.origin
    folder = Path(spec.origin).parent / "lib"
    paths = [folder / name for name in LIBRARY_NAMES.get(sys.platform, ())]
    return next((ctypes.CDLL(str(path)) for path in paths if path.exists()), None)


def openmp_address() -> int:
    """Return the address of the function that starts work on ggml's threads, or 0 if ggml was built
    without OpenMP. Its arguments: the work, its data, the number of threads, and flags.
    """
    # The look-up also searches the libraries that ggml's library needs, so that the OpenMP found is
    # the one whose threads ggml uses.
    function = getattr(load_ggml_cpu(), RUN_PARALLEL, None)
    return ctypes.cast(function, ctypes.c_void_p).value or 0 if function else 0
