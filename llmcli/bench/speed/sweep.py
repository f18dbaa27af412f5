"""Sweeps: measurements of all values of a setting on this machine, to find the fastest value.

Every round measures all tests in random order, so that changes over time (heat, other programs)
affect all of them equally. Two tests are compared by pairs of times, one pair per round.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmcli.bench.speed.measure import SpeedResult, average, standard_deviation
from llmcli.bench.speed.parameter_grid import SpeedTest
from llmcli.bench.statistics.paired_test import Comparison, Design, estimate_ratio
from llmcli.charts.chart import Table
from llmcli.errors import UserError
from llmcli.runtime import kv_size
from llmcli.runtime.binding.contexts.cache_types import KV_TYPES, check_cache_types

# for each sweep, the settings whose values it varies
SWEEPS = {
    "threads_sweep": ("threads",),
    "ubatch_sweep": ("ubatch",),
    "kv_sweep": ("type_k", "type_v"),
    "fa_sweep": ("flash",),
}
MAX_CONSECUTIVE_THREADS = 8  # numbers of threads up to this one are all measured
UBATCH_SIZES = tuple(64 << power for power in range(6))  # micro-batch sizes from 64 to 2048 tokens
OPTION_FLAGS = {
    "threads": "threads",
    "ubatch": "ubatch-size",
    "type_k": "cache-type-k",
    "type_v": "cache-type-v",
    "flash": "flash-attn",
}
COLUMN_TITLES = {
    "threads_sweep": "threads",
    "ubatch_sweep": "ubatch",
    "kv_sweep": "KV",
    "fa_sweep": "fa",
}
CONFIDENCE = 0.95
# with fewer rounds, the fastest of nine values could not be distinguished from the others
DEFAULT_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class SweepEntry:
    """The result of one value in a sweep.

    `comparison`: its speed relative to the fastest value; None for the fastest value itself.
    `mark`: "level" if the value cannot be distinguished from the fastest; "fastest" for the fastest
    value if no other is level with it; otherwise "".
    """

    result: SpeedResult
    comparison: Comparison | None
    mark: str


def sweep_values(sweep: str, cpus: int, cores: int, max_ubatch: int) -> list[str]:
    """Return the values that a sweep measures, as text. `sweep` is a key of SWEEPS: numbers of
    threads up to `cpus`, micro-batch sizes up to `max_ubatch` tokens, all KV cache types, or flash
    attention on and off.
    """
    if sweep == "threads_sweep":
        return [str(count) for count in thread_counts(cpus, cores)]
    if sweep == "ubatch_sweep":
        return [str(size) for size in UBATCH_SIZES if size <= max_ubatch] or [str(max_ubatch)]
    return list(KV_TYPES) if sweep == "kv_sweep" else ["on", "off"]


def thread_counts(cpus: int, cores: int) -> list[int]:
    """Return the numbers of threads to measure, up to `cpus`: 1 to 8, then 12, 16, 24, 32 and so
    on, and always `cores` and `cpus`.
    """
    steps = {count << power for count in (8, 12) for power in range(cpus.bit_length())}
    return sorted(
        {
            count
            for count in {*range(1, MAX_CONSECUTIVE_THREADS + 1), *steps, cores, cpus}
            if count <= cpus
        }
    )


def allowed_tests(tests: Sequence[SpeedTest], metadata: Mapping[str, Any]) -> list[SpeedTest]:
    """Return the tests that llmcli can run: those whose K and V have the same type, and whose type
    works with the model and the flash attention setting.
    """
    return [test for test in tests if test.type_k == test.type_v and not _refused(test, metadata)]


def _refused(test: SpeedTest, metadata: Mapping[str, Any]) -> bool:
    try:
        check_cache_types(test.type_k, test.type_v, test.flash_attn)
        kv_size.check_cache(metadata, test.type_k, test.type_v)
    except UserError:
        return True
    return False


def measure_rounds(
    tests: Sequence[SpeedTest], repetitions: int, measure: Callable[[SpeedTest], SpeedResult]
) -> list[SpeedResult]:
    """Measure each test `repetitions` times. Each round calls `measure` once for every test, in
    random order. Tests that llama.cpp refuses in the first round are left out. Returns one result
    per test.
    """
    measured_results: list[list[SpeedResult]] = [[] for _ in tests]
    remaining = list(range(len(tests)))
    for number in range(repetitions):
        random.shuffle(remaining)
        for index in remaining:
            try:
                measured_results[index].append(measure(tests[index]))
            except UserError:
                if number:
                    raise
        remaining = [index for index in remaining if measured_results[index]]
    return [_combine(results) for results in measured_results if results]


def _combine(results: Sequence[SpeedResult]) -> SpeedResult:
    """Combine several results of the same test into one with all their samples."""
    samples = tuple(ns for result in results for ns in result.samples_ns)
    return replace(
        results[0],
        samples_ns=samples,
        tokens_ms=tuple(ms for result in results for ms in result.tokens_ms),
    )


def rank_results(results: Sequence[SpeedResult]) -> Iterator[list[SweepEntry]]:
    """Yield the entries of each kind of test (pp512, tg128, …). The entries of a kind are the
    measured values in their original order, each compared with the fastest.
    """
    kinds: dict[str, list[SpeedResult]] = {}
    for result in results:
        kinds.setdefault(result.test.title, []).append(result)
    yield from map(_rank_group, kinds.values())


def _rank_group(results: list[SpeedResult]) -> list[SweepEntry]:
    """Compare each result of one kind of test with the fastest result."""
    best = max(results, key=lambda result: average(result.samples_ts))
    # by Bonferroni's bound, each comparison may use an equal part of the error probability
    design = Design(confidence=1 - (1 - CONFIDENCE) / max(1, len(results) - 1))
    comparisons = [
        None if result is best else estimate_ratio(best.samples_ts, result.samples_ts, design)
        for result in results
    ]
    levels = [comparison is not None and comparison.high >= 1 for comparison in comparisons]
    best_mark = "level" if any(levels) else "fastest"
    return [
        SweepEntry(
            result, comparison, best_mark if comparison is None else "level" if is_level else ""
        )
        for result, comparison, is_level in zip(results, comparisons, levels, strict=True)
    ]


def build_table(results: Sequence[SpeedResult], sweep_names: Sequence[str]) -> Table:
    """Build the table of a sweep. `sweep_names`: keys of SWEEPS, each of which has a column."""
    columns = (
        "test",
        *(COLUMN_TITLES[name] for name in sweep_names),
        "tok/s",
        "of the fastest",
        "",
    )
    rows: list[tuple[str, ...]] = []
    for group in rank_results(results):
        for entry in group:
            test, rates, comparison = entry.result.test, entry.result.samples_ts, entry.comparison
            values_by_sweep = {
                "threads_sweep": test.n_threads,
                "ubatch_sweep": test.n_ubatch,
                "kv_sweep": test.type_k,
                "fa_sweep": test.flash_attn,
            }
            relative_speed = (
                "" if comparison is None else f"{comparison.ratio:.3f} ({_span(comparison)})"
            )
            speed = f"{average(rates):.2f} ± {standard_deviation(rates):.2f}"
            rows.append(
                (
                    test.title,
                    *(str(values_by_sweep[name]) for name in sweep_names),
                    speed,
                    relative_speed,
                    entry.mark,
                )
            )
    return Table(columns, tuple(rows), frozenset(range(1, len(columns) - 1)))


def _span(comparison: Comparison) -> str:
    return (
        "too few rounds"
        if math.isinf(comparison.high)
        else f"{comparison.low:.3f} to {comparison.high:.3f}"
    )
