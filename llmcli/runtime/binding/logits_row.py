"""A row of logits in llama.cpp's own memory."""

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llmcli.runtime.binding.context import Context

Logits = NDArray[np.float32]


class LogitsRow:
    """The logits of one row, a view float32 `[n_vocab]`. The object and the view are valid until
    the next decode.
    """

    __slots__ = ("address", "context", "index", "logits")

    def __init__(self, context: "Context", address: int) -> None:
        array: Any = (ctypes.c_float * context.n_vocab).from_address(address)
        self.context, self.address, self.index = context, address, 0
        self.logits: Logits = np.frombuffer(array, np.float32)

    def log_sum(self, near: float) -> float:
        """Return the log of the sum of exp(logits). Fastest when `near` is close to the largest
        logit.
        """
        return self.context.log_sum_exp(self.logits, self.address, near)
