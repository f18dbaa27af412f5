"""Loads llama.cpp once, keeps its log for error messages, and makes it print less when it aborts.

All code uses llama_cpp through `lib()`.
"""

import functools
import importlib
from collections import deque
from typing import Any

from llmcli import config
from llmcli.errors import UserError

LOG_ERROR = 4  # enum ggml_log_level

_words: deque[str] = deque(maxlen=200)
# callbacks that C has pointers to; freeing one would cause a segmentation fault
_kept: list[Any] = []


@functools.cache
def lib() -> Any:
    """Return the llama_cpp module, which the first call loads and initializes. The errors in its
    log are collected for `last_log_lines`.

    Raises UserError when it is missing or does not load.
    """
    config.disable_backtrace()
    try:
        module: Any = importlib.import_module("llama_cpp.llama_cpp")
    except ImportError:
        raise UserError(
            "llama-cpp-python is not installed here",
            hint="scripts/setup builds it for this machine",
        ) from None
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"llama.cpp's library does not load: {error}",
            hint="it may have been built for another CPU: "
            "delete the cached wheel and run scripts/setup again",
        ) from None
    _kept.append(module.llama_log_callback(_hear))
    module.llama_backend_init()
    return module


def last_log_lines(count: int = 4) -> str:
    """Return the last `count` error lines of llama.cpp, joined to one line with the newest last.
    Empty when there are none.
    """
    return "; ".join(list(_words)[-count:])


def reset_log() -> None:
    """Clear the log. Called before a call of llama.cpp whose errors are to be read.

    The log callback is also set again, because it belongs to the whole process and other code may
    have replaced it.
    """
    _words.clear()
    lib().llama_log_set(_kept[-1], None)


def ggml() -> Any:
    """Return libggml (devices, type names), in the copy that llama.cpp itself uses.

    It is reached through libllama, which is linked to this copy. In a wheel libggml.so and
    libggml.so.0 are separate files, so loading libggml.so by name would give a second list of
    devices, which llama.cpp does not use.
    """
    return lib()._lib


def llama_cpp_version() -> str:
    """Return the version of the installed llama-cpp-python."""
    from importlib.metadata import version as distribution_version

    return distribution_version("llama-cpp-python")


def _hear(level: int, text: bytes, _data: object) -> None:
    if level == LOG_ERROR:
        line = text.decode("utf-8", "replace").strip()
        # "llama_model_load: error loading model: …": drop the function's name.
        head, colon, tail = line.partition(": ")
        _words.append(tail if colon and " " not in head else line)
