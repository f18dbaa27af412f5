"""Forward passes over random tokens. The batches are prepared before the clock starts, so that only
llama.cpp is measured.

Several sequences are computed as in batched-bench: their prompts one after another, but their
generated tokens together in one batch.

Source: tools/llama-bench/llama-bench.cpp (test_prompt, test_gen), tools/batched-bench.
"""

import random
import time
from collections.abc import Callable, Sequence

from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.model import Model
from llmcli.runtime.binding.rows.batch import BatchRows

SEED = 0x11
# after a change of context, model or threads, the speed is stable after this many seconds
SETTLING_SECONDS = 0.05

PreparedPass = Callable[[], None]


def run_passes(passes: Sequence[PreparedPass]) -> list[int]:
    """Run the forward passes in order. Returns time stamps in nanoseconds: one before the first
    pass, and one after each pass.
    """
    clock = time.perf_counter_ns
    stamps = [clock()]
    for forward in passes:
        forward()
        stamps.append(clock())
    return stamps


class RandomPasses:
    """Prepares forward passes over random tokens for one context with `sequences` sequences."""

    def __init__(self, context: Context, model: Model, sequences: int = 1) -> None:
        self.context, self.n_batch, self.n_vocab = context, context.n_batch, context.n_vocab
        self.sequences = range(sequences)
        self.bos_token = model.bos if model.add_bos else None
        self.random = random.Random(SEED)

    def prompt_passes(self, start: int, count: int) -> list[PreparedPass]:
        """Prepare the passes of a prompt of `count` tokens for each sequence, starting at position
        `start`. Each pass computes one batch of up to n_batch tokens.
        """
        cells = [(sequence, start + index) for sequence in self.sequences for index in range(count)]
        passes = []
        for batch_start in range(0, len(cells), self.n_batch):
            sequences, positions = zip(
                *cells[batch_start : batch_start + self.n_batch], strict=True
            )
            needs_logits = [position == start + count - 1 for position in positions]
            # like llama-bench, request the logits of the last token of every batch
            needs_logits[-1] = True
            tokens = [self.choose_token(position) for position in positions]
            passes.append(
                self.context.prepare(BatchRows(tokens, positions, sequences, needs_logits))
            )
        return passes

    def token_passes(self, start: int, count: int) -> list[PreparedPass]:
        """Prepare `count` generation passes, starting at position `start`. Each pass computes one
        token of every sequence.
        """
        return [
            self.context.prepare(self.step_rows(position))
            for position in range(start, start + count)
        ]

    def step_rows(self, position: int) -> BatchRows:
        """Return a batch with one random token of every sequence, all at the same position."""
        tokens = tuple(self.choose_token(position) for _ in self.sequences)
        return BatchRows(
            tokens, (position,) * len(tokens), tuple(self.sequences), (True,) * len(tokens)
        )

    def choose_token(self, position: int) -> int:
        """Return the token for a position: BOS at position 0 if the model uses BOS, otherwise a
        random token.
        """
        if position == 0 and self.bos_token is not None:
            return self.bos_token
        return self.random.randrange(self.n_vocab)
