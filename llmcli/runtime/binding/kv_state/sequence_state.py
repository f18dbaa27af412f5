"""Saves and restores the state of one sequence of a context (llama_state_seq_* of llama.h).

llama.cpp does not check the bytes of a state: they must come from the same build, model and cache
types. For states from files, kv_state_file.py checks this.
"""

import ctypes
from typing import Any

import numpy as np

from llmcli.runtime.binding import contract
from llmcli.runtime.binding.kv_state.state_slicing import extract_sequence
from llmcli.runtime.binding.library import lib, reset_log

# sequence id for the state of all sequences, which lists the sequences of each cell
ALL_SEQUENCES = -1
PARTIAL_ONLY = contract.CONSTANTS["LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY"]
MAX_POOL_BYTES = 256 << 20  # largest pool that is read as a whole to get one sequence


def read_state(context: Any, sequence: int, is_scattered: bool = False) -> memoryview:
    """Return the state of a sequence as bytes, in memory owned by the caller.

    `is_scattered`: whether the cells of the sequence lie in many short stretches of the pool.
    Copying them one stretch at a time is slow when llama.cpp stores the V cache by channel. The
    state of all sequences is then read at once, and the bytes of this sequence are cut out of it.
    The result is the same. A pool of more than MAX_POOL_BYTES is not read in this way.
    """
    if is_scattered and (size := _size(context, ALL_SEQUENCES)) <= MAX_POOL_BYTES:
        return extract_sequence(_read(context, ALL_SEQUENCES, size), sequence)
    return _read(context, sequence, _size(context, sequence))


def _size(context: Any, sequence: int) -> int:
    """Return the number of bytes of a sequence's state."""
    return int(lib().llama_state_seq_get_size(context, sequence))


def _read(context: Any, sequence: int, size: int) -> memoryview:
    """Return the state of a sequence, or of all sequences (ALL_SEQUENCES), as written by llama.cpp.
    `size`: its number of bytes.
    """
    buffer = np.empty(size, np.uint8)  # ctypes would fill it with zeros first
    pointer = ctypes.cast(buffer.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
    written = lib().llama_state_seq_get_data(context, pointer, size, sequence)
    assert written == size > 0, (written, size)
    return buffer.data


def write_state(context: Any, sequence: int, state: bytes | memoryview) -> bool:
    """Replace the cells of a sequence by those of a state from `read_state`. Return False when
    llama.cpp refuses the state.

    It refuses a state with another layout, or with more cells than are free. Some cells may have
    been restored nevertheless, so the caller must then drop all cells of the sequence.
    """
    array = np.frombuffer(state, np.uint8)
    pointer = ctypes.cast(array.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
    reset_log()
    return int(lib().llama_state_seq_set_data(context, pointer, array.size, sequence)) == array.size


def partial_size(context: Any, sequence: int) -> int:
    """Return the number of bytes of `read_partial_state`."""
    return int(lib().llama_state_seq_get_size_ext(context, sequence, PARTIAL_ONLY))


def read_partial_state(context: Any, sequence: int) -> memoryview:
    """Return the part of a sequence's state that cannot be cut at its end: recurrent state, or the
    cells of layers with a sliding window. The bytes are in memory owned by the caller.
    """
    size = partial_size(context, sequence)
    buffer = np.empty(size, np.uint8)
    pointer = ctypes.cast(buffer.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
    written = lib().llama_state_seq_get_data_ext(context, pointer, size, sequence, PARTIAL_ONLY)
    assert written == size > 0, (written, size)
    return buffer.data


def write_partial_state(context: Any, sequence: int, state: memoryview) -> bool:
    """Replace this part of a sequence's state by that from `read_partial_state`. Return False when
    llama.cpp refuses the state; the caller must then drop all cells of the sequence.
    """
    array = np.frombuffer(state, np.uint8)
    pointer = ctypes.cast(array.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
    reset_log()
    read = lib().llama_state_seq_set_data_ext(context, pointer, array.size, sequence, PARTIAL_ONLY)
    return int(read) == array.size


def append_state(
    context: Any,
    memory: Any,
    sequence: int,
    spare: int,
    state: bytes | memoryview,
    has_cells: bool,
) -> bool:
    """Append the cells of a state to the end of a sequence. Return False when llama.cpp refuses the
    state; the sequence is unchanged then.

    llama.cpp drops all cells of a sequence before it restores a state. The earlier cells are
    therefore shared with the unused sequence id `spare` in the meantime. `has_cells`: whether the
    sequence has earlier cells.
    """
    library = lib()
    if has_cells:
        library.llama_memory_seq_cp(memory, sequence, spare, -1, -1)
    accepted = write_state(context, sequence, state)
    if not accepted:
        library.llama_memory_seq_rm(memory, sequence, -1, -1)
    if has_cells:
        library.llama_memory_seq_cp(memory, spare, sequence, -1, -1)
        library.llama_memory_seq_rm(memory, spare, -1, -1)
    return accepted
