"""The roofline chart. A line shows the highest speed that memory and arithmetic allow, and each
measured test is a point on or below the line.

The x axis is operations per byte read, the y axis operations per second. The slope of the line is
the measured memory bandwidth. Its flat segment is the highest rate of operations that a prompt
reached on this machine.

Source: Williams, Waterman and Patterson 2009.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.bench.cost.token_cost import TokenCost, token_cost
from llmcli.bench.plots.speed import test_names
from llmcli.bench.roofline import MachineBandwidth
from llmcli.bench.speed.measure import SpeedResult, average
from llmcli.charts.chart import (
    Axis,
    ChartRow,
    NamedValue,
    Plot,
    Point,
    ReferenceLine,
    RowChart,
    Series,
)
from llmcli.charts.scale import format_number
from llmcli.units import format_size
from quant.model_file.model_header import ModelHeader

BYTES_PER_GB = 1e9


@dataclass(frozen=True, slots=True)
class RooflineTest:
    """A test as a point of the roofline chart. `rate`: tokens per second.

    `bytes_per_pass`: bytes that one forward pass reads, including the KV cache. `tokens_per_pass`:
    tokens that one forward pass computes.
    """

    name: str
    rate: float
    operations_per_token: float
    bytes_per_pass: float
    tokens_per_pass: float
    is_prompt: bool

    @property
    def intensity(self) -> float:
        """Operations per byte read."""
        return self.operations_per_token * self.tokens_per_pass / self.bytes_per_pass

    @property
    def operations_per_second(self) -> float:
        """The operations that the test computed per second."""
        return self.rate * self.operations_per_token

    def attainable_rate(self, memory_bandwidth: float, peak_operations: float | None) -> float:
        """Return the tokens per second that memory and arithmetic allow. `memory_bandwidth`: bytes
        per second. `peak_operations`: operations per second; None: unknown, so only the memory is a
        limit.
        """
        memory_limit = memory_bandwidth * self.intensity
        return (
            memory_limit if peak_operations is None else min(memory_limit, peak_operations)
        ) / self.operations_per_token


def place_tests(results: Sequence[SpeedResult], header: ModelHeader) -> list[RooflineTest]:
    """Return the points of all tests whose bytes and operations are known. Tests that measure
    prompt and generation together have no point.
    """
    points = []
    prompts = [result for result in results if not result.test.n_gen]
    generations = [result for result in results if not result.test.n_prompt]
    for result, name in [
        *zip(prompts, test_names(prompts), strict=True),
        *zip(generations, test_names(generations), strict=True),
    ]:
        test, rate = result.test, average(result.samples_ts)
        # the cost grows linearly with the depth, so the middle token has the mean cost
        middle = test.n_depth + (test.n_prompt + test.n_gen) // 2
        cost = token_cost(header, middle, test.type_k, test.type_v)
        if cost.attention_operations is None or cost.kv_bytes is None:
            continue
        points.append(
            _prompt_point(result, name, rate, cost)
            if test.n_prompt
            else _generation_point(result, name, rate, cost)
        )
    return [result for result in points if result]


def _generation_point(
    result: SpeedResult, name: str, rate: float, cost: TokenCost
) -> RooflineTest | None:
    """Return the point of a generation test. Each forward pass reads the weights once for all
    sequences, and the KV cache of each sequence.

    Returns None for several sequences of a model with routed experts, because it is unknown which
    experts they use.
    """
    count = result.test.n_parallel
    if count > 1 and cost.has_routed_experts:
        return None
    assert cost.kv_bytes is not None and cost.attention_operations is not None, name
    nbytes = sum(cost.weight_bytes.values()) + count * cost.kv_bytes
    return RooflineTest(
        name,
        rate,
        cost.weight_operations + cost.attention_operations,
        nbytes,
        count,
        is_prompt=False,
    )


def _prompt_point(
    result: SpeedResult, name: str, rate: float, cost: TokenCost
) -> RooflineTest | None:
    """Return the point of a prompt test. Each micro-batch reads the weights once, and the KV caches
    of its sequences. The output head is computed only for the last token.

    Returns None for a model with routed experts, because it is unknown which experts a micro-batch
    uses.
    """
    if cost.has_routed_experts:
        return None
    assert cost.kv_bytes is not None and cost.attention_operations is not None, name
    test = result.test
    count = min(test.n_ubatch, test.n_batch, test.n_prompt * test.n_parallel)
    caches = -(-count // test.n_prompt)
    each = (
        cost.weight_operations
        - cost.head_operations
        + cost.attention_operations
        + cost.head_operations / test.n_prompt
    )
    return RooflineTest(
        name,
        rate,
        each,
        sum(cost.weight_bytes.values()) + caches * cost.kv_bytes,
        count,
        is_prompt=True,
    )


def build_chart(
    memory_bandwidth: float | None, cache: int | None, tests: Sequence[RooflineTest]
) -> Plot:
    """Build the roofline chart. `memory_bandwidth`: bytes per second, None: unknown. `cache`: bytes
    of the last-level cache, None: unknown.
    """
    peak = max((test.operations_per_second for test in tests if test.is_prompt), default=None)
    series = [] if memory_bandwidth is None else [_roofline(memory_bandwidth, peak, tests)]
    for name, prompt in (("generation", False), ("prompts", True)):
        points = tuple(
            _point(test, memory_bandwidth, peak) for test in tests if test.is_prompt == prompt
        )
        series += [Series(name, points, line=False)] if points else []
    ridge = None if memory_bandwidth is None or peak is None else peak / memory_bandwidth
    rules = (
        ()
        if ridge is None
        else (ReferenceLine(ridge, f"ridge: {format_number(ridge, 3)} op/byte"),)
    )
    return Plot(
        "Roofline",
        _describe(memory_bandwidth, cache, tests, peak),
        Axis("operations a byte read", is_log=True),
        Axis("G operations a second", is_log=True),
        tuple(series),
        rules,
    )


def _roofline(roof: float, peak: float | None, tests: Sequence[RooflineTest]) -> Series:
    intensities = [test.intensity for test in tests] + ([peak / roof] if peak else [])
    first, last = min(intensities) / 2, max(intensities) * 2
    corner = [last] if peak is None else [peak / roof, last]
    points = [
        Point(at, min(roof * at, peak or roof * at) / BYTES_PER_GB) for at in (first, *corner)
    ]
    return Series("what memory and arithmetic allow", tuple(points), marks=False)


def _point(test: RooflineTest, roof: float | None, peak: float | None) -> Point:
    share = (
        ""
        if roof is None or test.is_prompt
        else f", {test.rate / test.attainable_rate(roof, peak):.0%}"
    )
    return Point(
        test.intensity,
        test.operations_per_second / BYTES_PER_GB,
        test.name,
        f"{format_number(test.rate)} tok/s{share}",
    )


def _describe(
    roof: float | None, cache: int | None, tests: Sequence[RooflineTest], peak: float | None
) -> str:
    """Return the text above the chart: the two limits, and the fraction of them that generation
    reached.
    """
    if roof is None:
        return "The memory bandwidth is unknown, so no roofline is drawn."
    sentences = [f"Memory gives {format_number(roof / BYTES_PER_GB, 3)} GB/s"]
    if peak is not None:
        sentences.append(
            f"prompts reach {format_number(peak / BYTES_PER_GB, 3)} G operations a second"
        )
    shares = [test.rate / test.attainable_rate(roof, peak) for test in tests if not test.is_prompt]
    if shares:
        low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
        sentences.append(
            f"generation {low if low == high else f'{low} to {high}'} of what they allow"
        )
    fits_cache = cache is not None and any(
        not test.is_prompt and test.bytes_per_pass <= cache for test in tests
    )
    cache_note = (
        f" The data of a token may fit the last-level cache ({format_size(cache or 0)}): then more"
        " than 100% is possible."
    )
    return ", ".join(sentences) + "." + (cache_note if fits_cache else "")


def build_bandwidth_chart(machine: MachineBandwidth) -> RowChart:
    """Build the chart of the measured memory bandwidth. Each row is one buffer size with one number
    of threads. Its value is the fastest round, and its whisker extends to the slowest.
    """
    rows = []
    for reading in machine.readings:
        best, slowest = reading.best_rate / BYTES_PER_GB, min(reading.round_rates) / BYTES_PER_GB
        threads = f"{reading.threads} thread{'s' * (reading.threads != 1)}"
        rows.append(
            ChartRow(
                f"{format_size(reading.nbytes)}, {threads}",
                (NamedValue("GB/s", best),),
                format_number(best),
                (slowest, best),
            )
        )
    cache = (
        "The size of the last-level cache is unknown."
        if machine.cache_bytes is None
        else f"The last-level cache holds {format_size(machine.cache_bytes)}."
    )
    description = f"{cache} The best round of each size; whiskers reach to the slowest round."
    return RowChart("Reading memory", description, Axis("GB/s"), tuple(rows))
