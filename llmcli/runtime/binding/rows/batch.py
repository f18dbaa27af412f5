"""The input of a forward pass (llama_batch), and the callback that can stop the pass."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UserError
from llmcli.runtime.binding.contract import field_setter, set_fields
from llmcli.runtime.binding.library import lib


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The input of one forward pass, one row per token: the token id, its position, its sequence
    id, and whether to compute logits for it. The four sequences have equal length.

    `branches`: for each row of a tree of tokens the numbers of the branches that contain it, where
    branch 0 is the sequence itself. All rows then have the same sequence. Empty without a tree.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    sequences: Sequence[int]
    wants_logits: Sequence[bool]
    branches: Sequence[tuple[int, ...]] = ()

    def __len__(self) -> int:
        return len(self.tokens)


UNSET_FLAG = ctypes.create_string_buffer(2)  # the flag of an abort_callback that never stops a pass
GET_LOGITS_ITH = ctypes.CFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32
)  # the C type of llama_get_logits_ith


class Batch:
    """A llama_batch whose arrays are owned by Python, so nothing must be freed in C.

    The arrays are ctypes arrays and not numpy arrays, because filling them runs less code. This
    matters right after a forward pass, when none of the engine's code is in the CPU caches.
    """

    def __init__(self, capacity: int) -> None:
        # Any, because the stubs do not know that array slices accept any sequence of integers
        ints: Any = ctypes.c_int32 * capacity
        flags: Any = ctypes.c_int8 * capacity
        self.token, self.position, self.sequence, self.wants_logits = (
            ints(),
            ints(),
            ints(),
            flags(),
        )
        counts = np.ones(capacity, np.int32)  # one sequence id per row
        rows = np.uint64(ctypes.addressof(self.sequence)) + 4 * np.arange(capacity, dtype=np.uint64)
        self._c_arrays = counts, rows  # a reference, because C has only their addresses
        self.struct = struct = lib().llama_batch()
        self._set_count = field_setter(struct, "n_tokens")
        types = dict(struct._fields_)
        for name, address in (
            ("token", ctypes.addressof(self.token)),
            ("pos", ctypes.addressof(self.position)),
            ("n_seq_id", counts.ctypes.data),
            ("seq_id", rows.ctypes.data),
            ("logits", ctypes.addressof(self.wants_logits)),
        ):
            set_fields(struct, **{name: ctypes.cast(address, types[name])})

    def fill(self, rows: "BatchRows") -> None:
        """Copy the rows into the arrays. There may be at most `capacity` rows."""
        count = len(rows.tokens)
        self._set_count(count)
        if count == 1:
            (self.token[0],), (self.position[0],) = rows.tokens, rows.positions
            (self.sequence[0],), (self.wants_logits[0],) = rows.sequences, rows.wants_logits
            return
        self.token[:count] = rows.tokens
        self.position[:count] = rows.positions
        self.sequence[:count] = rows.sequences
        self.wants_logits[:count] = rows.wants_logits


class TreeBatch(Batch):
    """A batch whose rows belong to several sequences each: the branches of a tree of tokens."""

    def __init__(self, capacity: int, n_sequences: int) -> None:
        super().__init__(capacity)
        self._ids = np.zeros((capacity, n_sequences), np.int32)
        self._counts = np.zeros(capacity, np.int32)
        stride = self._ids.strides[0]
        self._addresses = np.uint64(self._ids.ctypes.data) + stride * np.arange(
            capacity, dtype=np.uint64
        )
        types = dict(self.struct._fields_)
        for name, address in (
            ("n_seq_id", self._counts.ctypes.data),
            ("seq_id", self._addresses.ctypes.data),
        ):
            set_fields(self.struct, **{name: ctypes.cast(address, types[name])})

    def fill_tree(self, rows: "BatchRows", sequences: Sequence[Sequence[int]]) -> None:
        """Copy the rows into the arrays, and the sequence ids of each row."""
        self.fill(rows)
        for number, ids in enumerate(sequences):
            self._counts[number] = len(ids)
            self._ids[number, : len(ids)] = ids


class StateBatch(Batch):
    """A batch whose rows have a hidden state each, besides their token."""

    def __init__(self, capacity: int, n_embd: int) -> None:
        super().__init__(capacity)
        self.states = np.zeros((capacity, n_embd), np.float32)
        kind = dict(self.struct._fields_)["embd"]
        set_fields(self.struct, embd=ctypes.cast(self.states.ctypes.data, kind))


class InputBatch:
    """A llama_batch of rows of numbers without tokens, for an encoder. llama.cpp sets positions and
    sequences itself.
    """

    def __init__(self, capacity: int, width: int) -> None:
        self._numbers = np.zeros((capacity, width), np.float32)
        self.struct = struct = lib().llama_batch()
        kind = dict(struct._fields_)["embd"]
        set_fields(struct, embd=ctypes.cast(self._numbers.ctypes.data, kind))

    def fill(self, numbers: NDArray[np.float32]) -> None:
        """Copy rows, `[rows, width]`, into the batch. There may be at most `capacity` rows."""
        self._numbers[: len(numbers)] = numbers
        set_fields(self.struct, n_tokens=len(numbers))


class StopFlag:
    """A flag that ends a forward pass early. llama.cpp reads it during a pass through
    `abort_callback`. Several contexts that compute in turn may share one flag.
    """

    def __init__(self) -> None:
        self.flag, self._is_requested = ctypes.create_string_buffer(2), False

    def request_stop(self) -> None:
        """End the running pass early, or the next pass if none is running. Safe to call from a
        signal handler.
        """
        # in this order, so that a pass that ends between the assignments does not lose the request
        self.flag[0], self._is_requested = b"\1", True

    def reset(self) -> None:
        """Clear the flag after a pass has ended, so that the next pass runs."""
        if self._is_requested:
            self._is_requested, self.flag[0] = False, b"\0"


def pointer_address(pointer: Any) -> int:
    """Return the address in a ctypes pointer or function as an integer; 0 for a null pointer."""
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


def reserved_outputs(outputs: int) -> int:
    """Return how many rows of logits to reserve in a context whose passes ask for at most `outputs`
    rows. The result is `outputs` or up to eight more.

    llama.cpp lays out the inputs of a pass before all other data. Each input is padded to 32 bytes
    (TENSOR_ALIGNMENT), and one input has four bytes per reserved row. If the inputs take an odd
    number of 32-byte units, all data after them straddles cache lines, which slows prompts.
    llama.cpp's own tools reserve a row for each token of a batch, which gives an even number.
    """
    units = -(-outputs // 8)
    return outputs if units % 2 == 0 else 8 * units + 1


def no_cache_error(is_diffusion: bool, is_encoder_decoder: bool) -> UserError:
    """Return the error for a pass over a model without a usable KV cache: a diffusion model, an
    encoder-decoder model or an embedding model. llama.cpp would abort the process.
    """
    if is_encoder_decoder:
        return UserError(
            "this model has an encoder and a decoder; llmcli runs only models with a decoder",
            hint="use it with llmcli serve and /v1/embeddings, which need only its encoder",
        )
    if is_diffusion:
        message = (
            "this model writes by diffusion, all positions of an answer at once; "
            "llmcli runs only models that write token by token"
        )
        return UserError(message, hint="run it with llama.cpp's llama-diffusion-cli")
    message = "this model was made for embeddings: it writes no text"
    return UserError(message, hint="use it with llmcli serve and /v1/embeddings")


def abort_callback(flag: Any) -> tuple[Any, Any]:
    """Return an abort callback for llama.cpp and the data pointer that llama.cpp passes to it.
    `flag`: a ctypes string buffer. A pass runs while the buffer holds an empty string, and any
    character stops it.

    The callback is libc's strlen and its data is `flag`, so no Python code runs while the graph is
    computed.
    """
    strlen = ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p)
    return ctypes.cast(strlen, lib().ggml_abort_callback), ctypes.cast(flag, ctypes.c_void_p)
