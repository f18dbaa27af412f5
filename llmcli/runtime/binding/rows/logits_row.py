"""The logits that a pass computed for one token: a view of llama.cpp's own memory, without a
copy.
"""

import ctypes
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.binding.kernels.log_sum_exp import LogSumExp

Logits = NDArray[np.float32]


class LogitsSource(Protocol):
    """The attributes of a context that a LogitsRow uses. Tests replace the context by a smaller
    object.
    """

    n_vocab: int
    log_sum_exp: LogSumExp


class LogitsRow:
    """The logits for one token of a batch. `logits` is a float32 view `[n_vocab]` of llama.cpp's
    memory at `address`, and `index` is the token's index in the batch. The object and the view are
    valid until the next call of `Context.decode`.
    """

    __slots__ = ("address", "context", "index", "logits")

    def __init__(self, context: LogitsSource, address: int) -> None:
        array: Any = (ctypes.c_float * context.n_vocab).from_address(address)
        self.context, self.address, self.index = context, address, 0
        self.logits: Logits = np.frombuffer(array, np.float32)

    def log_sum(self, near: float) -> float:
        """Return the log of the sum of exp(logits). `near`: an estimate of the largest logit. A
        good estimate saves the search for the maximum, and a bad one changes only the time.
        """
        return self.context.log_sum_exp(self.logits, self.address, near)
