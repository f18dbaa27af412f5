"""What a context keeps of one sequence, taken out and put back (llama_state_seq_* of llama.h).

llama.cpp trusts the bytes it is given: they must be its own, of the same build, model and cache
types, which runtime/state.py sees to.
"""

import ctypes
from typing import Any

import numpy as np

from llmcli.runtime.binding.carved import cut
from llmcli.runtime.binding.library import lib, listen

ALL = -1  # sequences, with whoever holds each cell
MOST = 256 << 20  # bytes of the state of all that are read for the sake of one


def take(context: Any, sequence: int, scattered: bool = False) -> memoryview:
    """The state of a sequence; the memory is the caller's. Of one whose cells lie `scattered` that
    of all is read and taken apart, where it is not too large: the same bytes sooner, where values
    lie by channel.
    """
    if scattered and (size := _size(context, ALL)) <= MOST:
        return cut(_read(context, ALL, size), sequence)
    return _read(context, sequence, _size(context, sequence))


def _size(context: Any, sequence: int) -> int:
    return int(lib().llama_state_seq_get_size(context, sequence))


def _read(context: Any, sequence: int, size: int) -> memoryview:
    buffer = np.empty(size, np.uint8)  # ctypes would fill it with zeros first
    pointer = ctypes.cast(buffer.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
    written = lib().llama_state_seq_get_data(context, pointer, size, sequence)
    assert written == size > 0, (written, size)
    return buffer.data


def put(context: Any, sequence: int, state: bytes | memoryview) -> bool:
    """Let a sequence hold a state in place of what it held; False where llama.cpp refuses it.

    Refused is one for which there are not enough cells, or that is kept otherwise than this context
    keeps it; parts of it may have been put, and must be dropped.
    """
    array = np.frombuffer(state, np.uint8)
    pointer = ctypes.cast(array.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
    listen()
    return int(lib().llama_state_seq_set_data(context, pointer, array.size, sequence)) == array.size


def append(
    context: Any,
    memory: Any,
    sequence: int,
    beginning: int,
    state: bytes | memoryview,
    behind: bool,
) -> bool:
    """Put a state `behind` what a sequence holds; False where llama.cpp refuses it: then it holds
    what it held.

    llama.cpp lets go of all that a sequence holds before it takes a state: meanwhile the empty
    sequence `beginning` holds on to it.
    """
    library = lib()
    if behind:
        library.llama_memory_seq_cp(memory, sequence, beginning, -1, -1)
    good = put(context, sequence, state)
    if not good:
        library.llama_memory_seq_rm(memory, sequence, -1, -1)
    if behind:
        library.llama_memory_seq_cp(memory, beginning, sequence, -1, -1)
        library.llama_memory_seq_rm(memory, beginning, -1, -1)
    return good
