"""Forward passes over random tokens, laid out before a clock starts: what is measured is llama.cpp
alone.

As llama-bench computes them (tools/llama-bench/llama-bench.cpp, test_prompt and test_gen), and for
several sequences as batched-bench does (tools/batched-bench): their prompts one behind the other,
their next tokens side by side.
"""

import random
import time
from collections.abc import Callable, Sequence

from llmcli.runtime.binding.context import Context, Rows
from llmcli.runtime.binding.model import Model

SEED = 0x11

Pass = Callable[[], None]


def run_passes(passes: Sequence[Pass]) -> list[int]:
    """Compute the passes one after the other; the time before the first and after each, in
    nanoseconds.
    """
    clock = time.perf_counter_ns
    stamps = [clock()]
    for forward in passes:
        forward()
        stamps.append(clock())
    return stamps


class RandomPasses:
    """Forward passes for one context, ready to be called; `sequences` of it advance together."""

    def __init__(self, context: Context, model: Model, sequences: int = 1) -> None:
        self.context, self.n_batch, self.n_vocab = context, context.n_batch, context.n_vocab
        self.sequences = range(sequences)
        self.first = model.bos if model.add_bos else None
        self.random = random.Random(SEED)

    def prompt(self, start: int, count: int) -> list[Pass]:
        """A prompt of `count` tokens for each sequence from position `start`, a batch a pass."""
        places = [
            (sequence, start + index) for sequence in self.sequences for index in range(count)
        ]
        passes = []
        for at in range(0, len(places), self.n_batch):
            sequences, positions = zip(*places[at : at + self.n_batch], strict=True)
            wants = [position == start + count - 1 for position in positions]
            wants[-1] = True  # as llama-bench: the last of every batch
            tokens = [self.token(position) for position in positions]
            passes.append(self.context.prepare(Rows(tokens, positions, sequences, wants)))
        return passes

    def steps(self, start: int, count: int) -> list[Pass]:
        """`count` tokens for each sequence from position `start`, one of each a pass."""
        return [
            self.context.prepare(self.step(position)) for position in range(start, start + count)
        ]

    def step(self, position: int) -> Rows:
        """The rows of one such pass."""
        tokens = tuple(self.token(position) for _ in self.sequences)
        return Rows(tokens, (position,) * len(tokens), tuple(self.sequences), (True,) * len(tokens))

    def token(self, position: int) -> int:
        """BOS where the model begins with one, else any."""
        if position == 0 and self.first is not None:
            return self.first
        return self.random.randrange(self.n_vocab)
