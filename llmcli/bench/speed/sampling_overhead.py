"""Generation including sampling and detokenizing: every token is drawn by the sampler chain and
converted to text.

It alternates with decoding alone, in one context and at the same positions. Drift of the machine
affects both, and the difference is the cost of the sampler, the detokenizer and building the batch.
The sampling settings are the defaults.
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

STRETCH = 16  # consecutive tokens whose mean time forms one side of a pair
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
    """Measure decoding alone and with sampling, `repetitions` of each, in alternating order.
    Otherwise like `measure_test`.
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
            for samples in (alone, sampled) if number % 2 == 0 else (sampled, alone):
                samples.append(trial.run() if samples is alone else sample(trial))
    extra = compare(alone, sampled)
    return result(about, test, began, alone), result(about, test, began, sampled, extra)


def sample(trial: Trial) -> Sample:
    """Measure one repetition with sampling."""
    model, test = trial.model, trial.test
    vocabulary = ModelVocabulary(model.piece, model.is_end, model.n_vocab)
    native = NativeChains(model.n_vocab, model.vocab)
    with ExitStack() as stack:
        chains = [
            stack.enter_context(
                closing(make_chain(default_sampling(), SEED + sequence, native, vocabulary))
            )
            for sequence in range(test.n_parallel)
        ]
        trial.bring()
        start = time.perf_counter_ns()
        run_passes(trial.prompt)
        rows = trial.passes.step(test.n_depth + test.n_prompt)
        stamps = [time.perf_counter_ns()]
        texts: list[list[int]] = [[] for _ in chains]
        decoders = [Detokenizer() for _ in chains]
        for _ in range(test.n_gen):
            logits = trial.context.decode(rows)
            if not texts[0]:
                refuse_nan(logits[0])
            tokens = []
            for row, chain, text, decoder in zip(logits, chains, texts, decoders, strict=True):
                token = chain.draw(row, text)
                text.append(token)
                tokens.append(token)
                decoder.feed(model.piece(token))
            rows = BatchRows(
                tokens,
                [position + 1 for position in rows.positions],
                rows.sequences,
                rows.wants_logits,
            )
            stamps.append(time.perf_counter_ns())
        return Sample(stamps[-1] - start, gaps(stamps))


def compare(alone: Sequence[Sample], sampled: Sequence[Sample]) -> Extra:
    """Return the time that sampling adds per token, from pairs at the same position of the same
    repetition.
    """
    pairs = [
        pair
        for plain_sample, sampled_sample in zip(alone, sampled, strict=True)
        for pair in _stretches(plain_sample, sampled_sample)
    ]
    middle, low, high = shift([with_it - without for without, with_it in pairs], ERROR)
    has_interval = low != -float("inf")
    plain = median(without for without, _ in pairs)
    return Extra(
        middle, low if has_interval else None, high if has_interval else None, middle / plain
    )


def _stretches(plain: Sample, sampled: Sample) -> Iterator[tuple[float, float]]:
    """Yield the mean milliseconds per token of both sides for each stretch of PAIR_TOKENS
    tokens.
    """
    for start in range(0, len(plain.tokens_ms), STRETCH):
        yield (
            fmean(plain.tokens_ms[start : start + STRETCH]),
            fmean(sampled.tokens_ms[start : start + STRETCH]),
        )
