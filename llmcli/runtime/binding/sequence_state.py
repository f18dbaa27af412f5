"""Saves and restores the state of one sequence of a context (llama_state_seq_* of llama.h).

llama.cpp does not check the bytes of a state: they must come from the same build, model and cache
types. For states from files, kv_state_file.py checks this.
"""

import ctypes
from typing import Any

import numpy as np

from llmcli.runtime.binding.library import lib, reset_log
from llmcli.runtime.binding.state_slicing import extract_sequence

# the id that stands for all sequences; such a state contains the owners of each cell
ALL_SEQUENCES = -1
MAX_POOL_BYTES = 256 << 20  # if the pool is larger, it is not read as a whole to get one sequence


def read_state(context: Any, sequence: int, is_scattered: bool = False) -> memoryview:
    """Return the state of a sequence, in memory owned by the caller. `is_scattered`: the cells of
    the sequence are in many places. The whole pool is read then, unless it is too large, and the
    sequence is cut out. This gives the same bytes, and faster where values are stored by channel.
    """
    if is_scattered and (size := _size(context, ALL_SEQUENCES)) <= MAX_POOL_BYTES:
        return extract_sequence(_read(context, ALL_SEQUENCES, size), sequence)
    return _read(context, sequence, _size(context, sequence))


def _size(context: Any, sequence: int) -> int:
    return int(lib().llama_state_seq_get_size(context, sequence))


def _read(context: Any, sequence: int, size: int) -> memoryview:
    buffer = np.empty(size, np.uint8)  # ctypes would fill it with zeros first
    pointer = ctypes.cast(buffer.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
    written = lib().llama_state_seq_get_data(context, pointer, size, sequence)
    assert written == size > 0, (written, size)
    return buffer.data


def write_state(context: Any, sequence: int, state: bytes | memoryview) -> bool:
    """Replace the cells of a sequence by those of a state. Return False when llama.cpp refuses the
    state.

    It refuses a state that does not fit into the free cells, or that has another layout. Some cells
    may have been restored nevertheless, and the caller must drop them.
    """
    array = np.frombuffer(state, np.uint8)
    pointer = ctypes.cast(array.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
    reset_log()
    return int(lib().llama_state_seq_set_data(context, pointer, array.size, sequence)) == array.size


def append_state(
    context: Any,
    memory: Any,
    sequence: int,
    beginning: int,
    state: bytes | memoryview,
    has_beginning: bool,
) -> bool:
    """Append the cells of a state to a sequence. Return False when llama.cpp refuses the state; the
    sequence is unchanged then. `has_beginning`: whether the sequence has cells already.

    llama.cpp drops all cells of a sequence before it restores a state. `beginning` is an empty
    sequence that holds the earlier cells in the meantime.
    """
    library = lib()
    if has_beginning:
        library.llama_memory_seq_cp(memory, sequence, beginning, -1, -1)
    good = write_state(context, sequence, state)
    if not good:
        library.llama_memory_seq_rm(memory, sequence, -1, -1)
    if has_beginning:
        library.llama_memory_seq_cp(memory, beginning, sequence, -1, -1)
        library.llama_memory_seq_rm(memory, beginning, -1, -1)
    return good
