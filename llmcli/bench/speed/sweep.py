"""A setting's values on this machine, measured in turn, and which of them is the fastest.

Every round visits every test, in a random order: what changes with time (heat, neighbours) meets
them all, and two of them are compared round by round (paired.py). It knows nothing of how one test
is measured.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmcli.bench.speed.measure import Result, average, deviation
from llmcli.bench.speed.parameter_grid import Test
from llmcli.bench.statistics.paired_test import Comparison, Design, judge
from llmcli.errors import UserError
from llmcli.runtime import kv_size
from llmcli.runtime.binding.cache_types import KV_TYPES, check_cache_types

# The flag of a sweep, the options whose values it chooses, and the fields of a Test they become.
SWEEPS = {
    "threads_sweep": ("threads",),
    "ubatch_sweep": ("ubatch",),
    "kv_sweep": ("type_k", "type_v"),
    "fa_sweep": ("flash",),
}
EACH = 8  # threads: every number up to this one
UBATCHES = tuple(64 << power for power in range(6))  # 64 to 2048
FLAGS = {
    "threads": "threads",
    "ubatch": "ubatch-size",
    "type_k": "cache-type-k",
    "type_v": "cache-type-v",
    "flash": "flash-attn",
}
SHOWN = {"threads_sweep": "threads", "ubatch_sweep": "ubatch", "kv_sweep": "KV", "fa_sweep": "fa"}
CONFIDENCE = 0.95
ROUNDS = 10  # fewer cannot tell the fastest of nine from the others, however far ahead it is


@dataclass(frozen=True, slots=True)
class Standing:
    """One value's place: `against` is its speed in units of the fastest one's, None where it is
    that one; `mark` is fastest, level (the noise does not tell them apart), or nothing.
    """

    result: Result
    against: Comparison | None
    mark: str


def values(sweep: str, cpus: int, cores: int, most: int) -> list[str]:
    """What a sweep tries: threads up to the CPUs, micro-batches up to `most` tokens, all cache
    types, fa on and off.
    """
    if sweep == "threads_sweep":
        return [str(count) for count in threads(cpus, cores)]
    if sweep == "ubatch_sweep":
        return [str(size) for size in UBATCHES if size <= most] or [str(most)]
    return list(KV_TYPES) if sweep == "kv_sweep" else ["on", "off"]


def threads(cpus: int, cores: int) -> list[int]:
    """Every number up to eight, then half as many again or a third more each time; the cores and
    the CPUs always.
    """
    steps = {count << power for count in (8, 12) for power in range(cpus.bit_length())}
    return sorted({count for count in {*range(1, EACH + 1), *steps, cores, cpus} if count <= cpus})


def allowed(tests: Sequence[Test], metadata: Mapping[str, Any]) -> list[Test]:
    """Those that can be: K and V of one type, and what this model and flash attention take."""
    return [test for test in tests if test.type_k == test.type_v and not _refused(test, metadata)]


def _refused(test: Test, metadata: Mapping[str, Any]) -> bool:
    try:
        check_cache_types(test.type_k, test.type_v, test.flash_attn)
        kv_size.check_cache(metadata, test.type_k, test.type_v)
    except UserError:
        return True
    return False


def rounds(
    tests: Sequence[Test], repetitions: int, measured: Callable[[Test], Result]
) -> list[Result]:
    """Each test as often as that, all of them in every round; a test that llama.cpp refuses is left
    out.
    """
    found: list[list[Result]] = [[] for _ in tests]
    left = list(range(len(tests)))
    for number in range(repetitions):
        random.shuffle(left)
        for index in left:
            try:
                found[index].append(measured(tests[index]))
            except UserError:
                if number:
                    raise
        left = [index for index in left if found[index]]
    return [_together(each) for each in found if each]


def _together(results: Sequence[Result]) -> Result:
    """Several measurements of one test as one."""
    samples = tuple(ns for result in results for ns in result.samples_ns)
    return replace(
        results[0],
        samples_ns=samples,
        tokens_ms=tuple(ms for result in results for ms in result.tokens_ms),
    )


def standings(results: Sequence[Result]) -> Iterator[list[Standing]]:
    """For each kind of test (pp512, tg128, …) its values, in the order they were given."""
    kinds: dict[str, list[Result]] = {}
    for result in results:
        kinds.setdefault(result.test.title, []).append(result)
    yield from map(_ranked, kinds.values())


def _ranked(results: list[Result]) -> list[Standing]:
    best = max(results, key=lambda result: average(result.samples_ts))
    # One of many is looked for: each comparison gets its part of the doubt (Bonferroni).
    sure = Design(confidence=1 - (1 - CONFIDENCE) / max(1, len(results) - 1))
    against = [
        None if one is best else judge(best.samples_ts, one.samples_ts, sure) for one in results
    ]
    level = [found is not None and found.high >= 1 for found in against]
    first = "level" if any(level) else "fastest"
    return [
        Standing(one, found, first if found is None else "level" if same else "")
        for one, found, same in zip(results, against, level, strict=True)
    ]


def table(
    results: Sequence[Result], swept: Sequence[str]
) -> tuple[list[str], list[list[str]], list[str]]:
    """Columns, rows, and the columns to be aligned to the right."""
    columns = ["test", *(SHOWN[name] for name in swept), "tok/s", "of the fastest", ""]
    rows = []
    for group in standings(results):
        for one in group:
            test, rates, against = one.result.test, one.result.samples_ts, one.against
            chosen = {
                "threads_sweep": test.n_threads,
                "ubatch_sweep": test.n_ubatch,
                "kv_sweep": test.type_k,
                "fa_sweep": test.flash_attn,
            }
            told = "" if against is None else f"{against.ratio:.3f} ({_span(against)})"
            speed = f"{average(rates):.2f} ± {deviation(rates):.2f}"
            rows.append([test.title, *(str(chosen[name]) for name in swept), speed, told, one.mark])
    return columns, rows, columns[1:-1]


def _span(found: Comparison) -> str:
    return "too few rounds" if math.isinf(found.high) else f"{found.low:.3f} to {found.high:.3f}"
