"""Generation with all that makes text of it: every token drawn by the sampler chain and turned into
characters.

Measured in turn with decoding alone, in one context and at the same positions: the machine's drift
hits both, and what is left is what the sampler, the detokenizer and laying out their batch cost.
The settings are the defaults.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from statistics import fmean, median

from llmcli.bench.speed.depth_states import Depths
from llmcli.bench.speed.measure import (
    Extra,
    Result,
    Sample,
    Subject,
    Trial,
    gaps,
    moment,
    ready,
    result,
)
from llmcli.bench.speed.parameter_grid import Test
from llmcli.bench.speed.random_passes import SEED, run_passes
from llmcli.bench.statistics.paired_test import shift
from llmcli.runtime.binding.batch import BatchRows
from llmcli.runtime.binding.model import Model
from llmcli.runtime.binding.sampler import NativeChains
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.sampling.chain import make_chain
from llmcli.runtime.strategies.base import ModelVocabulary, refuse_nan
from llmcli.runtime.text.detokenizer import Detokenizer

STRETCH = 16  # tokens whose times are compared as one: a pair
ERROR = 0.05


def measure(
    model: Model,
    about: Subject,
    test: Test,
    repetitions: int,
    *,
    warmup: bool = True,
    depths: Depths | None = None,
    tick: Callable[[int], None] = lambda number: None,
) -> tuple[Result, Result]:
    """Decoding alone, and with sampling: `repetitions` of each, who is first changing. As
    kernel.measure otherwise.
    """
    began = moment()
    alone: list[Sample] = []
    sampled: list[Sample] = []
    with ready(model, test, depths) as trial:
        if warmup:
            trial.warm()
            sample(trial)
        for number in range(repetitions):
            tick(number)
            for side in (alone, sampled) if number % 2 == 0 else (sampled, alone):
                side.append(trial.run() if side is alone else sample(trial))
    extra = compare(alone, sampled)
    return result(about, test, began, alone), result(about, test, began, sampled, extra)


def sample(trial: Trial) -> Sample:
    """One repetition with sampling."""
    model, test = trial.model, trial.test
    words = ModelVocabulary(model.piece, model.is_end, model.n_vocab)
    native = NativeChains(model.n_vocab, model.vocab)
    with ExitStack() as stack:
        chains = [
            stack.enter_context(closing(make_chain(default_sampling(), SEED + one, native, words)))
            for one in range(test.n_parallel)
        ]
        trial.bring()
        start = time.perf_counter_ns()
        run_passes(trial.prompt)
        rows = trial.passes.step(test.n_depth + test.n_prompt)
        stamps = [time.perf_counter_ns()]
        texts: list[list[int]] = [[] for _ in chains]
        decoders = [Detokenizer() for _ in chains]
        for _ in range(test.n_gen):
            found = trial.context.decode(rows)
            if not texts[0]:
                refuse_nan(found[0])
            tokens = []
            for row, chain, text, decoder in zip(found, chains, texts, decoders, strict=True):
                token = chain.draw(row, text)
                text.append(token)
                tokens.append(token)
                decoder.feed(model.piece(token))
            rows = BatchRows(
                tokens, [place + 1 for place in rows.positions], rows.sequences, rows.wants_logits
            )
            stamps.append(time.perf_counter_ns())
        return Sample(stamps[-1] - start, gaps(stamps))


def compare(alone: Sequence[Sample], sampled: Sequence[Sample]) -> Extra:
    """What sampling adds to a token, from the stretches of both at the same place of the same
    repetition.
    """
    pairs = [
        pair for one, other in zip(alone, sampled, strict=True) for pair in _stretches(one, other)
    ]
    middle, low, high = shift([with_it - without for without, with_it in pairs], ERROR)
    known = low != -float("inf")
    plain = median(without for without, _ in pairs)
    return Extra(middle, low if known else None, high if known else None, middle / plain)


def _stretches(one: Sample, other: Sample) -> Iterator[tuple[float, float]]:
    """Mean milliseconds a token of each side; the last stretch may be short."""
    for start in range(0, len(one.tokens_ms), STRETCH):
        yield (
            fmean(one.tokens_ms[start : start + STRETCH]),
            fmean(other.tokens_ms[start : start + STRETCH]),
        )
