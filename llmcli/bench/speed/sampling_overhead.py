"""The speed of generation with sampling and detokenizing: the sampler chain draws each token, which
is then converted to text.

Repetitions with sampling alternate with repetitions of decoding alone, in the same context and at
the same positions, so that changes of the machine's speed affect both. The difference is the cost
of the sampler, the detokenizer and building the batch. The sampling settings are the defaults.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from statistics import fmean, median

from llmcli.bench.speed.depth_states import DepthStates
from llmcli.bench.speed.measure import (
    ModelUnderTest,
    Repetition,
    SamplingCost,
    SpeedResult,
    SpeedTrial,
    build_result,
    milliseconds_between,
    open_trial,
)
from llmcli.bench.speed.parameter_grid import SpeedTest
from llmcli.bench.speed.random_passes import SEED, run_passes
from llmcli.bench.statistics.paired_test import signed_rank_interval
from llmcli.runtime.binding.model import Model
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.binding.sampler import NativeChains
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.sampling.chain import make_chain
from llmcli.runtime.strategies.base import refuse_nan
from llmcli.runtime.text.detokenizer import Detokenizer
from llmcli.units import format_current_time

PAIR_TOKENS = 16  # number of consecutive tokens whose mean times form one pair
ERROR_PROBABILITY = 0.05


def measure_with_sampling(
    model: Model,
    subject: ModelUnderTest,
    test: SpeedTest,
    repetitions: int,
    *,
    warmup: bool = True,
    depths: DepthStates | None = None,
    on_repetition: Callable[[int], None] = lambda number: None,
) -> tuple[SpeedResult, SpeedResult]:
    """Measure a test `repetitions` times with decoding alone, and as often with sampling, in
    alternating order. Returns both results in this order. The other parameters are those of
    `measure_test`.
    """
    began = format_current_time()
    decode_samples: list[Repetition] = []
    sampled: list[Repetition] = []
    with open_trial(model, test, depths) as trial:
        if warmup:
            trial.warm_up()
            measure_sampled(trial)
        for number in range(repetitions):
            on_repetition(number)
            for samples in (
                (decode_samples, sampled) if number % 2 == 0 else (sampled, decode_samples)
            ):
                samples.append(
                    trial.measure_once() if samples is decode_samples else measure_sampled(trial)
                )
    extra = compute_sampling_cost(decode_samples, sampled)
    return build_result(subject, test, began, decode_samples), build_result(
        subject, test, began, sampled, extra
    )


def measure_sampled(trial: SpeedTrial) -> Repetition:
    """Measure one repetition of generation with sampling and detokenizing."""
    model, test = trial.model, trial.test
    vocabulary = model
    native = NativeChains(model.n_vocab, model.vocab)
    with ExitStack() as stack:
        chains = [
            stack.enter_context(
                closing(make_chain(default_sampling(), SEED + sequence, native, vocabulary))
            )
            for sequence in range(test.n_parallel)
        ]
        trial.restore_depth()
        start = time.perf_counter_ns()
        run_passes(trial.prompt)
        rows = trial.passes.step_rows(test.n_depth + test.n_prompt)
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
        return Repetition(stamps[-1] - start, milliseconds_between(stamps))


def compute_sampling_cost(
    decode_samples: Sequence[Repetition], sampled: Sequence[Repetition]
) -> SamplingCost:
    """Return the time per token that sampling adds, by comparing pairs of times. Each pair has the
    time without and with sampling at the same positions of the same repetition.
    """
    pairs = [
        pair
        for plain_sample, sampled_sample in zip(decode_samples, sampled, strict=True)
        for pair in _paired_means(plain_sample, sampled_sample)
    ]
    middle, low, high = signed_rank_interval(
        [with_sampling - without for without, with_sampling in pairs], ERROR_PROBABILITY
    )
    has_interval = low != -float("inf")
    plain = median(without for without, _ in pairs)
    return SamplingCost(
        middle, low if has_interval else None, high if has_interval else None, middle / plain
    )


def _paired_means(plain: Repetition, sampled: Repetition) -> Iterator[tuple[float, float]]:
    """Yield pairs of mean milliseconds per token, (without sampling, with sampling), one pair for
    each PAIR_TOKENS consecutive tokens.
    """
    for start in range(0, len(plain.tokens_ms), PAIR_TOKENS):
        yield (
            fmean(plain.tokens_ms[start : start + PAIR_TOKENS]),
            fmean(sampled.tokens_ms[start : start + PAIR_TOKENS]),
        )
