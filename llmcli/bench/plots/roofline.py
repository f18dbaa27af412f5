"""The roofline chart: what memory and arithmetic allow, and the measured tests below it.

Every test is a point: operations per second over operations per byte read. The slope is the
measured speed of memory, the flat part the best rate of operations that a prompt reached on this
machine.

Source: Williams, Waterman and Patterson 2009.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.bench.cost.token_cost import Work, work
from llmcli.bench.plots.speed import names
from llmcli.bench.roofline import Machine
from llmcli.bench.speed.measure import Result, average
from llmcli.charts.chart import Axis, Plot, Point, Row, Rows, Rule, Series, Value
from llmcli.charts.scale import figure
from llmcli.units import size
from quant.model_file.model_header import ModelHeader

GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Placed:
    """A test on the roofline.

    `each`: operations per token. `nbytes`: bytes read for one pass over the weights. `tokens`:
    tokens computed by one pass.
    """

    name: str
    rate: float
    each: float
    nbytes: float
    tokens: float
    prompt: bool

    @property
    def intensity(self) -> float:
        """Operations per byte read."""
        return self.each * self.tokens / self.nbytes

    @property
    def operations(self) -> float:
        """Operations per second."""
        return self.rate * self.each

    def attainable(self, roof: float, peak: float | None) -> float:
        """Return the tokens per second that memory (`roof`, bytes per second) and arithmetic
        (`peak`, operations per second) allow.
        """
        most = roof * self.intensity
        return (most if peak is None else min(most, peak)) / self.each


def placed(results: Sequence[Result], header: ModelHeader) -> list[Placed]:
    """Place the tests on the roofline whose bytes and operations are known. Tests that mix prompt
    and generation are left out.
    """
    placed_tests = []
    prompts = [result for result in results if not result.test.n_gen]
    generations = [result for result in results if not result.test.n_prompt]
    for result, name in [
        *zip(prompts, names(prompts), strict=True),
        *zip(generations, names(generations), strict=True),
    ]:
        test, rate = result.test, average(result.samples_ts)
        middle = test.n_depth + (test.n_prompt + test.n_gen) // 2  # cost in the middle of the test
        cost = work(header, middle, test.type_k, test.type_v)
        if cost.attention is None or cost.kv is None:
            continue
        placed_tests.append(
            _prompt(result, name, rate, cost)
            if test.n_prompt
            else _generation(result, name, rate, cost)
        )
    return [result for result in placed_tests if result]


def _generation(result: Result, name: str, rate: float, cost: Work) -> Placed | None:
    """Place a generation test: each pass reads the weights once for all sequences, and the cache of
    each sequence.

    Returns None if the experts that several sequences choose are unknown.
    """
    count = result.test.n_parallel
    if count > 1 and cost.chosen:
        return None  # unknown: which experts several sequences choose
    assert cost.kv is not None and cost.attention is not None, name
    nbytes = sum(cost.weights.values()) + count * cost.kv
    return Placed(name, rate, cost.operations + cost.attention, nbytes, count, prompt=False)


def _prompt(result: Result, name: str, rate: float, cost: Work) -> Placed | None:
    """Place a prompt test: each micro-batch reads the weights and its sequences' caches once; the
    output head is computed only for the last token.
    """
    if cost.chosen:
        return None
    assert cost.kv is not None and cost.attention is not None, name
    test = result.test
    count = min(test.n_ubatch, test.n_batch, test.n_prompt * test.n_parallel)
    caches = -(-count // test.n_prompt)
    each = cost.operations - cost.head + cost.attention + cost.head / test.n_prompt
    return Placed(
        name, rate, each, sum(cost.weights.values()) + caches * cost.kv, count, prompt=True
    )


def chart(roof: float | None, cache: int | None, tests: Sequence[Placed]) -> Plot:
    """Build the roofline chart. `roof`: memory bandwidth in bytes per second, None: unknown.
    `cache`: bytes of the last-level cache.
    """
    peak = max((test.operations for test in tests if test.prompt), default=None)
    series = [] if roof is None else [_line(roof, peak, tests)]
    for name, prompt in (("generation", False), ("prompts", True)):
        points = tuple(_point(test, roof, peak) for test in tests if test.prompt == prompt)
        series += [Series(name, points, line=False)] if points else []
    ridge = None if roof is None or peak is None else peak / roof
    rules = () if ridge is None else (Rule(ridge, f"ridge: {figure(ridge, 3)} op/byte"),)
    return Plot(
        "Roofline",
        _says(roof, cache, tests, peak),
        Axis("operations a byte read", log=True),
        Axis("G operations a second", log=True),
        tuple(series),
        rules,
    )


def _line(roof: float, peak: float | None, tests: Sequence[Placed]) -> Series:
    intensities = [test.intensity for test in tests] + ([peak / roof] if peak else [])
    first, last = min(intensities) / 2, max(intensities) * 2
    corner = [last] if peak is None else [peak / roof, last]
    points = [Point(at, min(roof * at, peak or roof * at) / GIGA) for at in (first, *corner)]
    return Series("what memory and arithmetic allow", tuple(points), marks=False)


def _point(test: Placed, roof: float | None, peak: float | None) -> Point:
    share = (
        "" if roof is None or test.prompt else f", {test.rate / test.attainable(roof, peak):.0%}"
    )
    return Point(
        test.intensity, test.operations / GIGA, test.name, f"{figure(test.rate)} tok/s{share}"
    )


def _says(
    roof: float | None, cache: int | None, tests: Sequence[Placed], peak: float | None
) -> str:
    """Describe the roofline and the share of it that generation reached."""
    if roof is None:
        return "The memory bandwidth is unknown, so no roofline is drawn."
    sentences = [f"Memory gives {figure(roof / GIGA, 3)} GB/s"]
    if peak is not None:
        sentences.append(f"prompts reach {figure(peak / GIGA, 3)} G operations a second")
    shares = [test.rate / test.attainable(roof, peak) for test in tests if not test.prompt]
    if shares:
        low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
        sentences.append(
            f"generation {low if low == high else f'{low} to {high}'} of what they allow"
        )
    fits_cache = cache is not None and any(
        not test.prompt and test.nbytes <= cache for test in tests
    )
    cache_note = (
        f" The data of a token may fit the last-level cache ({size(cache or 0)}): then more than"
        " 100% is possible."
    )
    return ", ".join(sentences) + "." + (cache_note if fits_cache else "")


def bandwidth(machine: Machine) -> Rows:
    """Build the chart of the measured memory bandwidth: the best round of each size, with the
    slowest as its range.
    """
    rows = []
    for reading in machine.readings:
        best, slowest = reading.best / GIGA, min(reading.rates) / GIGA
        threads = f"{reading.threads} thread{'s' * (reading.threads != 1)}"
        rows.append(
            Row(
                f"{size(reading.nbytes)}, {threads}",
                (Value("GB/s", best),),
                figure(best),
                (slowest, best),
            )
        )
    cache = (
        "The size of the last-level cache is unknown."
        if machine.cache is None
        else f"The last-level cache holds {size(machine.cache)}."
    )
    says = f"{cache} The best round of each size; whiskers reach to the slowest round."
    return Rows("Reading memory", says, Axis("GB/s"), tuple(rows))
