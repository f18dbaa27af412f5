"""A row of logits in llama.cpp's own memory."""

import ctypes
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.binding.kernels.log_sum_exp import LogSumExp

Logits = NDArray[np.float32]


class LogitsSource(Protocol):
    """What a row needs of the context that computed it."""

    n_vocab: int
    log_sum_exp: LogSumExp


class LogitsRow:
    """The logits of one row, a view float32 `[n_vocab]`. The object and the view are valid until
    the next call of `Context.decode`.
    """

    __slots__ = ("address", "context", "index", "logits")

    def __init__(self, context: LogitsSource, address: int) -> None:
        array: Any = (ctypes.c_float * context.n_vocab).from_address(address)
        self.context, self.address, self.index = context, address, 0
        self.logits: Logits = np.frombuffer(array, np.float32)

    def log_sum(self, near: float) -> float:
        """Return the log of the sum of exp(logits). Fastest when `near` is close to the largest
        logit.
        """
        return self.context.log_sum_exp(self.logits, self.address, near)
