"""The llama_batch with the rows of a forward pass, and the callback that can stop the pass."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from llmcli.errors import UserError
from llmcli.runtime.binding.library import lib

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The rows of one forward pass: token, position, sequence, and whether the row gives logits."""

    tokens: Sequence[int]
    positions: Sequence[int]
    sequences: Sequence[int]
    wants_logits: Sequence[bool]

    def __len__(self) -> int:
        return len(self.tokens)


UNSET_FLAG = ctypes.create_string_buffer(2)  # the flag of an abort_callback that never stops a pass
GET_LOGITS_ITH = ctypes.CFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32
)  # the C type of llama_get_logits_ith


class Batch:
    """A llama_batch whose arrays are owned by Python, so nothing must be freed in C.

    The arrays are ctypes arrays and not numpy arrays: right after a forward pass, when none of the
    engine's code is in the CPU caches, filling them is faster because less code runs.
    """

    def __init__(self, capacity: int) -> None:
        ints: Any = (
            ctypes.c_int32 * capacity
        )  # array slices accept any sequence of integers, which the stubs do not know
        flags: Any = ctypes.c_int8 * capacity
        self.token, self.position, self.sequence, self.wants_logits = (
            ints(),
            ints(),
            ints(),
            flags(),
        )
        counts = np.ones(capacity, np.int32)  # one sequence id per row
        rows = np.uint64(ctypes.addressof(self.sequence)) + 4 * np.arange(capacity, dtype=np.uint64)
        self._kept = counts, rows
        self.struct = struct = lib().llama_batch()
        for name, address in (
            ("token", ctypes.addressof(self.token)),
            ("pos", ctypes.addressof(self.position)),
            ("n_seq_id", counts.ctypes.data),
            ("seq_id", rows.ctypes.data),
            ("logits", ctypes.addressof(self.wants_logits)),
        ):
            setattr(struct, name, ctypes.cast(address, dict(struct._fields_)[name]))

    def fill(self, rows: "BatchRows") -> None:
        count = self.struct.n_tokens = len(rows.tokens)
        if count == 1:
            (self.token[0],), (self.position[0],) = rows.tokens, rows.positions
            (self.sequence[0],), (self.wants_logits[0],) = rows.sequences, rows.wants_logits
            return
        self.token[:count] = rows.tokens
        self.position[:count] = rows.positions
        self.sequence[:count] = rows.sequences
        self.wants_logits[:count] = rows.wants_logits


class StopFlag:
    """Interrupts the pass of one context, or of several contexts that compute in turn."""

    def __init__(self) -> None:
        self.flag, self._asked = ctypes.create_string_buffer(2), False

    def request_stop(self) -> None:
        """End the running pass early, or the next one if none is running. Safe from a signal
        handler.
        """
        self.flag[0], self._asked = (
            b"\1",
            True,
            # this order matters: a pass that ends between the two assignments must not lose the request
        )

    def reset(self) -> None:
        """Forget a request to stop, after a pass has ended."""
        if self._asked:
            self._asked, self.flag[0] = False, b"\0"


def pointer_address(pointer: Any) -> int:
    """Return the address that a ctypes pointer or function points to."""
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


def reserved_outputs(outputs: int) -> int:
    """Return how many rows of logits to reserve so that a pass may ask for `outputs` rows: this
    many, or at most eight more.

    llama.cpp lays out the inputs of a pass before all other data. Each input is padded to 32 bytes
    (TENSOR_ALIGNMENT), and one input has four bytes per reserved row. If the inputs take an odd
    number of 32-byte units, all following data straddles cache lines, which slows prompts by about
    30 %. llama.cpp's own tools reserve a row for each token of a batch, which gives an even number.
    """
    pieces = -(-outputs // 8)
    return outputs if pieces % 2 == 0 else 8 * pieces + 1


def no_cache_error(is_diffusion: bool) -> UserError:
    """Return the error for a pass over a model without a cache. llama.cpp would treat such a model
    as an encoder and abort the process.
    """
    if is_diffusion:
        message = (
            "this model writes by diffusion, all positions of an answer at once; "
            "llmcli runs only models that write token by token"
        )
        return UserError(message, hint="run it with llama.cpp's llama-diffusion-cli")
    message = "this model was made for embeddings: it writes no text"
    return UserError(message, hint="use it with llmcli serve and /v1/embeddings")


def abort_callback(flag: Any) -> tuple[Any, Any]:
    """Return an abort callback and its data. The callback is libc's strlen and its data is `flag`,
    so no Python code runs while the graph is computed.

    An empty string in `flag` lets the pass run; any character stops it.
    """
    strlen = ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p)
    return ctypes.cast(strlen, lib().ggml_abort_callback), ctypes.cast(flag, ctypes.c_void_p)
