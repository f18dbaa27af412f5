"""Loading llama.cpp once: its log kept for error messages, its aborts kept short.

Knows nothing of models. Everything of llama_cpp that the project uses is reached through `lib()`.
"""

import functools
import importlib
from collections import deque
from typing import Any

from llmcli import config
from llmcli.errors import UserError

ERROR, CONTINUED = 4, 5  # enum ggml_log_level

_words: deque[str] = deque(maxlen=200)
_kept: list[Any] = []  # callbacks that C holds: a dropped one is a segmentation fault


@functools.cache
def lib() -> Any:
    """The llama_cpp module, loaded and started at the first call; its log goes to `last_words`."""
    config.quiet_library()
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
            hint="it may have been built for another CPU: delete the cached wheel and run scripts/setup again",
        ) from None
    _kept.append(module.llama_log_callback(_hear))
    module.llama_backend_init()
    return module


def last_words(count: int = 4) -> str:
    """The last error lines of llama.cpp, newest last, as one line; empty when it said nothing."""
    return "; ".join(list(_words)[-count:])


def listen() -> None:
    """Forget what was said before the call that is about to be made, and hear what it says.

    The log is taken anew each time: it is one for the whole process, and others may have taken it.
    """
    _words.clear()
    lib().llama_log_set(_kept[-1], None)


def ggml() -> Any:
    """libggml's functions (devices, type names) in the copy that llama.cpp itself uses.

    Found through libllama, which is linked to it. A wheel keeps no links, so that libggml.so beside
    libggml.so.0 is another file, and loading it another list of devices: what is registered there
    llama.cpp never sees (2026-11).
    """
    return lib()._lib


def version() -> str:
    """The version of llama-cpp-python, read from its distribution."""
    from importlib.metadata import version as distribution_version

    return distribution_version("llama-cpp-python")


def _hear(level: int, text: bytes, _data: object) -> None:
    if level == ERROR:
        line = text.decode("utf-8", "replace").strip()
        # "llama_model_load: error loading model: …": the function's name helps nobody.
        head, colon, tail = line.partition(": ")
        _words.append(tail if colon and " " not in head else line)
