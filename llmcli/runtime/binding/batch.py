"""The llama_batch that the rows of a forward pass are laid out in, and what may stop the pass."""

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from llmcli.errors import UserError
from llmcli.runtime.binding.library import lib

if TYPE_CHECKING:
    from llmcli.runtime.binding.context import Rows

NEVER = ctypes.create_string_buffer(2)  # a flag for abort_on that nobody sets
LOGITS_ITH = ctypes.CFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32
)  # llama_get_logits_ith


class Batch:
    """A llama_batch over arrays of ours: nothing to free.

    ctypes' arrays, not numpy's: after a forward pass nothing of ours is left in the caches, and
    what counts is how much code a call touches (four slices filled: 20 µs against 50 then, 1
    against 2 when warm).
    """

    def __init__(self, capacity: int) -> None:
        ints: Any = (
            ctypes.c_int32 * capacity
        )  # they take any sequence of integers, which the stubs do not know
        flags: Any = ctypes.c_int8 * capacity
        self.token, self.position, self.sequence, self.wants = ints(), ints(), ints(), flags()
        counts = np.ones(capacity, np.int32)  # one sequence id a row
        rows = np.uint64(ctypes.addressof(self.sequence)) + 4 * np.arange(capacity, dtype=np.uint64)
        self._kept = counts, rows
        self.struct = struct = lib().llama_batch()
        for name, address in (
            ("token", ctypes.addressof(self.token)),
            ("pos", ctypes.addressof(self.position)),
            ("n_seq_id", counts.ctypes.data),
            ("seq_id", rows.ctypes.data),
            ("logits", ctypes.addressof(self.wants)),
        ):
            setattr(struct, name, ctypes.cast(address, dict(struct._fields_)[name]))

    def fill(self, rows: "Rows") -> None:
        count = self.struct.n_tokens = len(rows.tokens)
        if count == 1:
            (self.token[0],), (self.position[0],) = rows.tokens, rows.positions
            (self.sequence[0],), (self.wants[0],) = rows.sequences, rows.wants
            return
        self.token[:count] = rows.tokens
        self.position[:count] = rows.positions
        self.sequence[:count] = rows.sequences
        self.wants[:count] = rows.wants


class Stop:
    """What interrupts a pass: of one context, or of several of which one computes at a time."""

    def __init__(self) -> None:
        self.flag, self._asked = ctypes.create_string_buffer(2), False

    def ask(self) -> None:
        """The running pass, or else the next one, shall end early. Safe from a signal handler."""
        self.flag[0], self._asked = (
            b"\1",
            True,
        )  # in this order: a pass that ends between must not forget it

    def heard(self) -> None:
        """A pass has ended."""
        if self._asked:
            self._asked, self.flag[0] = False, b"\0"


def address(pointer: Any) -> int:
    """Where a pointer or a function of ctypes points."""
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


def reserved(outputs: int) -> int:
    """How many rows of logits a context is made for so that a pass may ask for `outputs`: at most
    eight more.

    llama.cpp lays out a pass with its inputs first, each padded to 32 bytes (TENSOR_ALIGNMENT),
    among them four bytes for each of these rows. Where that is an odd number of 32 bytes, all that
    follows lies across two cache lines: a prompt of 128 tokens took 200 ms with 1 to 8 rows and 17
    to 24, 155 with 9 to 16 and 25 (SmolLM2 135M Q4_1, one thread's time on AMX and AVX-512,
    2026-11). llama.cpp's own tools reserve a batch of rows, which is even.
    """
    pieces = -(-outputs // 8)
    return outputs if pieces % 2 == 0 else 8 * pieces + 1


def no_cache(diffuses: bool) -> UserError:
    """For a pass over a model that keeps no cache: llama.cpp would take it for an encoder's, and
    abort.
    """
    if diffuses:
        what = "this model writes by diffusion, all places of an answer at once: llmcli runs those that write in order"
        return UserError(what, hint="llama.cpp's own llama-diffusion-cli runs it")
    what = "this model was made for embeddings: it writes no text"
    return UserError(what, hint="llmcli serve answers /v1/embeddings with it")


def abort_on(flag: Any) -> tuple[Any, Any]:
    """An abort callback and its data: libc's strlen over `flag`, so that no Python runs inside the
    graph.

    An empty text lets the pass run, one of a character stops it.
    """
    strlen = ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p)
    return ctypes.cast(strlen, lib().ggml_abort_callback), ctypes.cast(flag, ctypes.c_void_p)
