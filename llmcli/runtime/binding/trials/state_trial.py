"""Tries once whether this build of llama.cpp stores the state of a sequence as state_slicing.py
expects. The format has no version, so another build may change it.
"""

import logging

from llmcli.errors import UserError
from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.kv_state import sequence_state
from llmcli.runtime.binding.kv_state.state_slicing import extract_sequence, transpose_values
from llmcli.runtime.binding.rows.batch import BatchRows

# the sequence of each row: interleaved, so that the cells of a sequence are not consecutive
ROW_SEQUENCES = 0, 1, 0, 1, 0, 0
N_SHARED = 2  # cells of sequence 0 that the trial leaves out of a state


def can_move_states(source: Context, target: Context) -> bool:
    """Return whether states of `source`, which stores the V cache cell by cell, can be moved to
    `target`, which stores it channel by channel. Both must be empty, and are empty afterwards.

    A few tokens are computed in `source` and moved to `target` and back. llama.cpp must accept the
    bytes, and must write the same bytes itself.
    """
    if min(source.n_batch, source.n_ctx, target.n_ctx) < len(ROW_SEQUENCES) or min(
        source.n_seq_max, target.n_seq_max
    ) <= max(ROW_SEQUENCES):
        return False
    try:
        return _try_moves(source, target)
    except (AssertionError, LookupError, ValueError, UserError):  # another format of states
        logging.getLogger(__name__).debug("the trial of states failed", exc_info=True)
        return False
    finally:
        source.clear()
        target.clear()


def _try_moves(source: Context, target: Context) -> bool:
    positions = [ROW_SEQUENCES[:row].count(sequence) for row, sequence in enumerate(ROW_SEQUENCES)]
    tokens = [row % source.n_vocab for row in range(len(ROW_SEQUENCES))]
    source.decode(BatchRows(tokens, positions, list(ROW_SEQUENCES), [False] * len(tokens)))
    states = [sequence_state.read_state(source.pointer, sequence) for sequence in (0, 1)]
    whole = sequence_state.read_state(source.pointer, sequence_state.ALL_SEQUENCES)
    if any(extract_sequence(whole, sequence) != states[sequence] for sequence in (0, 1)):
        return False
    moved = [transpose_values(state) for state in states]
    if any(transpose_values(state) != states[number] for number, state in enumerate(moved)):
        return False
    if not all(target.write_state(sequence, moved[sequence]) for sequence in (0, 1)):
        return False
    if any(
        sequence_state.read_state(target.pointer, sequence) != moved[sequence]
        for sequence in (0, 1)
    ):
        return False
    whole = sequence_state.read_state(target.pointer, sequence_state.ALL_SEQUENCES)
    if any(extract_sequence(whole, sequence) != moved[sequence] for sequence in (0, 1)):
        return False
    # the last cells are appended to the first ones, as a prompt is appended to its cached prefix
    if not target.trim(0, N_SHARED) or not target.append_state(
        0, transpose_values(states[0], N_SHARED), N_SHARED
    ):
        return False
    return target.last_position(0) == ROW_SEQUENCES.count(0) - 1
