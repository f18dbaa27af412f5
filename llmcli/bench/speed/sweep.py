"""Sweeps, which measure all values of a setting on this machine and show which value is the
fastest.

Every round measures all tests in random order, so that changes over time (heat, other programs)
affect all of them equally. Two tests are compared by their pairs of times, one pair per round.
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
from llmcli.runtime.binding.cache_types import KV_TYPES, check_cache_types

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
# with fewer rounds, the fastest of nine values could not be told from the others
DEFAULT_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class SweepEntry:
    """The result of one value in a sweep.

    `comparison`: its speed relative to the fastest value; None for the fastest itself. `mark`:
    "fastest"; "level" if it cannot be told from the fastest; otherwise "".
    """

    result: SpeedResult
    comparison: Comparison | None
    mark: str


def sweep_values(sweep: str, cpus: int, cores: int, max_ubatch: int) -> list[str]:
    """Return the values that a sweep measures. Depending on `sweep`, these are numbers of threads
    up to `cpus`, micro-batch sizes up to `max_ubatch` tokens, all cache types, or flash attention
    on and off.
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
    """Return the tests that are possible: K and V have the same type, and the model and the flash
    attention setting support this type.
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
    """Measure each test `repetitions` times; each round measures all of them once. Tests that
    llama.cpp refuses are left out.
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
    return [_together(results) for results in measured_results if results]


def _together(results: Sequence[SpeedResult]) -> SpeedResult:
    """Combine several results of the same test into one."""
    samples = tuple(ns for result in results for ns in result.samples_ns)
    return replace(
        results[0],
        samples_ns=samples,
        tokens_ms=tuple(ms for result in results for ms in result.tokens_ms),
    )


def rank_results(results: Sequence[SpeedResult]) -> Iterator[list[SweepEntry]]:
    """Yield, for each kind of test (pp512, tg128, …), the results of all values in their original
    order.
    """
    kinds: dict[str, list[SpeedResult]] = {}
    for result in results:
        kinds.setdefault(result.test.title, []).append(result)
    yield from map(_ranked, kinds.values())


def _ranked(results: list[SpeedResult]) -> list[SweepEntry]:
    best = max(results, key=lambda result: average(result.samples_ts))
    # by Bonferroni's bound, each comparison may use an equal part of the error probability
    design = Design(confidence=1 - (1 - CONFIDENCE) / max(1, len(results) - 1))
    against = [
        None if result is best else estimate_ratio(best.samples_ts, result.samples_ts, design)
        for result in results
    ]
    level = [comparison is not None and comparison.high >= 1 for comparison in against]
    best_mark = "level" if any(level) else "fastest"
    return [
        SweepEntry(
            result, comparison, best_mark if comparison is None else "level" if is_level else ""
        )
        for result, comparison, is_level in zip(results, against, level, strict=True)
    ]


def build_table(results: Sequence[SpeedResult], sweep_names: Sequence[str]) -> Table:
    """Build the table of a sweep."""
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
            test, rates, against = entry.result.test, entry.result.samples_ts, entry.comparison
            values_by_sweep = {
                "threads_sweep": test.n_threads,
                "ubatch_sweep": test.n_ubatch,
                "kv_sweep": test.type_k,
                "fa_sweep": test.flash_attn,
            }
            relative_speed = "" if against is None else f"{against.ratio:.3f} ({_span(against)})"
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
