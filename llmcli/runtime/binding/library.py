"""Loads llama.cpp once, and keeps the error lines of its log for error messages.

All other modules get the llama_cpp module from `lib()`.
"""

import functools
import importlib
import importlib.util
import os
import sys
import threading
import types
from collections import deque
from pathlib import Path
from typing import Any

from llmcli import config
from llmcli.errors import UserError
from llmcli.runtime.binding import contract
from quant.installation import install_llama_command

MLOCK_WARNING = b"failed to mlock"
LOG_ERROR = contract.HEADER_NUMBERS["GGML_LOG_LEVEL_ERROR"]


class _ErrorLines(threading.local):
    """The last error lines that llama.cpp logged on this thread. It logs the reason why a call
    failed on the thread of the call, so calls on other threads have no influence on it.
    """

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=200)


_errors = _ErrorLines()
# held by all calls that read or change ggml's lists of back ends and devices, which have no lock of
# their own: searches for a device, loads of models, new contexts, and new workers
registry_lock = threading.RLock()
# callbacks that C has pointers to; freeing one would cause a segmentation fault
_callbacks: list[Any] = []


@functools.cache
def lib() -> Any:
    """Return the module llama_cpp.llama_cpp, the ctypes binding of llama.h. The first call loads
    and initializes llama.cpp, and starts to collect the errors in its log for `last_log_lines`.

    Raises UserError when llama-cpp-python is not installed or does not load, and when it is not the
    version that llmcli needs (contract.py).
    """
    config.disable_backtrace()
    config.limit_spinning()
    try:
        module: Any = importlib.import_module("llama_cpp.llama_cpp")
    except ImportError:
        raise UserError(
            "llama-cpp-python is not installed here",
            hint=f"build it for this machine: {install_llama_command()}",
        ) from None
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"llama.cpp's library does not load: {error}",
            hint="it may have been built for another CPU: "
            f"build it for this one: {install_llama_command()}",
        ) from None
    except AttributeError as error:  # the binding is newer than the library
        raise contract.version_error(f"the library and its binding differ: {error}") from None
    contract.check(module)
    _callbacks.append(module.llama_log_callback(_collect_error))
    module.llama_log_set(_callbacks[-1], None)
    module.llama_backend_init()
    return module


def is_loaded() -> bool:
    """Return whether this process has loaded llama.cpp."""
    return lib.cache_info().currsize > 0


def load_alone() -> None:
    """Load llama.cpp as `lib` does, but without the rest of the package llama_cpp, which imports
    numpy and Jinja and takes a tenth of a second. This is for a short process.
    """
    spec = importlib.util.find_spec("llama_cpp")
    if spec is not None and "llama_cpp" not in sys.modules:
        package = types.ModuleType("llama_cpp")
        package.__path__ = list(spec.submodule_search_locations or ())
        package.__spec__ = spec  # find_spec() needs it
        sys.modules["llama_cpp"] = package
    lib()


def last_log_lines(count: int = 4) -> str:
    """Return the last `count` error lines of llama.cpp on this thread, joined to one line with the
    newest last. Empty when there are none.
    """
    return "; ".join(list(_errors.lines)[-count:])


def reset_log() -> None:
    """Clear the collected error lines of this thread. This is done before a call of llama.cpp whose
    errors `last_log_lines` shall return.

    The log callback is also set again, because it belongs to the whole process and other code may
    have replaced it.
    """
    _errors.lines.clear()
    lib().llama_log_set(_callbacks[-1], None)


def ggml() -> Any:
    """Return libggml (devices, type names) as a ctypes library: the copy that llama.cpp itself
    uses.

    libllama is linked to this copy, so its functions are found through libllama. In a wheel
    libggml.so and libggml.so.0 are separate files. Loading libggml.so by name would give a second
    list of devices, which llama.cpp does not use.
    """
    return lib()._lib


def system_info() -> str:
    """Return llama.cpp's line about its back ends and their CPU features."""
    with registry_lock:
        text: bytes = lib().llama_print_system_info()
    return text.decode("utf-8", "replace")


def library_files() -> list[tuple[Path, os.stat_result]]:
    """Return the files of llama.cpp's libraries with their status. They change with every build."""
    folder = Path(lib()._lib._name).parent
    return [
        (path, path.stat())
        for path in sorted(folder.iterdir())
        if path.name.startswith(("libllama.", "libggml"))
    ]


def llama_cpp_version() -> str:
    """Return the version of the installed llama-cpp-python."""
    from importlib.metadata import version as distribution_version

    return distribution_version("llama-cpp-python")


def _collect_error(level: int, text: bytes, _data: object) -> None:
    """Store an error line of llama.cpp's log without the function name at its start. A failure to
    lock memory, of which llama.cpp only warns, counts as an error.
    """
    if level == LOG_ERROR or MLOCK_WARNING in text:
        line = text.decode("utf-8", "replace").strip()
        # "llama_model_load: error loading model: …": drop the function's name.
        head, colon, tail = line.partition(": ")
        _errors.lines.append(tail if colon and " " not in head else line)
