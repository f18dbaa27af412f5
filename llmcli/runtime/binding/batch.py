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


UNSET_FLAG = ctypes.create_string_buffer(2)  # a flag for abort_callback that is never set
GET_LOGITS_ITH = ctypes.CFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32
)  # llama_get_logits_ith


class Batch:
    """A llama_batch over arrays owned by Python, so there is nothing to free.

    ctypes arrays are filled faster than numpy's right after a forward pass, when none of the
    engine's code is in the CPU caches: the assignment runs less code.
    """

    def __init__(self, capacity: int) -> None:
        ints: Any = (
            ctypes.c_int32 * capacity
        )  # they accept any sequence of integers, which the stubs do not know
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
        """Make the running pass, or else the next one, end early. Safe from a signal handler."""
        self.flag[0], self._asked = (
            b"\1",
            True,
        )  # in this order: a pass that ends in between must not forget the request

    def reset(self) -> None:
        """Reset the request after a pass has ended."""
        if self._asked:
            self._asked, self.flag[0] = False, b"\0"


def pointer_address(pointer: Any) -> int:
    """Return the address that a ctypes pointer or function points to."""
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


def reserved_outputs(outputs: int) -> int:
    """Return how many rows of logits to reserve so that a pass may ask for `outputs`: at most eight
    more.

    llama.cpp lays out the inputs of a pass first, each padded to 32 bytes (TENSOR_ALIGNMENT), among
    them four bytes per row of logits. With an odd number of 32-byte units all following data
    straddles cache lines, which slows prompts by about 30 %. llama.cpp's own tools reserve a whole
    batch of rows, which is even.
    """
    pieces = -(-outputs // 8)
    return outputs if pieces % 2 == 0 else 8 * pieces + 1


def no_cache_error(is_diffusion: bool) -> UserError:
    """Return the error for a pass over a model without a cache, which llama.cpp would treat as an
    encoder and abort.
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
    """Return an abort callback and its data: libc's strlen over `flag`, so that no Python runs
    inside the graph.

    An empty string lets the pass run; a character stops it.
    """
    strlen = ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p)
    return ctypes.cast(strlen, lib().ggml_abort_callback), ctypes.cast(flag, ctypes.c_void_p)
