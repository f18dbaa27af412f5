"""The roofline: what reading memory and computing allow, and where the tests stand below it.

Every test is operations a second over operations a byte that must be read (Williams, Waterman and
Patterson 2009). The slope is the memory's measured speed, the flat part the best rate of operations
that a prompt here reached.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.bench.charts.chart import Axis, Plot, Point, Row, Rows, Rule, Series, Value
from llmcli.bench.charts.scale import figure
from llmcli.bench.kernel import Result, average
from llmcli.bench.pictures.speed import names
from llmcli.bench.roofline import Machine
from llmcli.bench.work import Work, work
from llmcli.units import size
from quant.container import Header

GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Placed:
    """A test on the roofline. `each`: operations a token, `nbytes`: that must be read for one pass
    over the weights, `tokens`: that one pass computes.
    """

    name: str
    rate: float
    each: float
    nbytes: float
    tokens: float
    prompt: bool

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.each * self.tokens / self.nbytes

    @property
    def operations(self) -> float:
        """Operations a second."""
        return self.rate * self.each

    def attainable(self, roof: float, peak: float | None) -> float:
        """Tokens a second at the roof."""
        most = roof * self.intensity
        return (most if peak is None else min(most, peak)) / self.each


def placed(results: Sequence[Result], header: Header) -> list[Placed]:
    """The tests whose bytes and operations are known: prompts or generation alone."""
    found = []
    prompts = [one for one in results if not one.test.n_gen]
    written = [one for one in results if not one.test.n_prompt]
    for one, name in [
        *zip(prompts, names(prompts), strict=True),
        *zip(written, names(written), strict=True),
    ]:
        test, rate = one.test, average(one.samples_ts)
        at = test.n_depth + (test.n_prompt + test.n_gen) // 2  # its middle stands for it
        cost = work(header, at, test.type_k, test.type_v)
        if cost.attention is None or cost.kv is None:
            continue
        found.append(
            _prompt(one, name, rate, cost) if test.n_prompt else _generation(one, name, rate, cost)
        )
    return [one for one in found if one]


def _generation(one: Result, name: str, rate: float, cost: Work) -> Placed | None:
    """Each pass reads the weights once for all sequences, and each sequence's cache."""
    count = one.test.n_parallel
    if count > 1 and cost.chosen:
        return None  # which experts so many tokens choose is not known
    assert cost.kv is not None and cost.attention is not None, name
    nbytes = sum(cost.weights.values()) + count * cost.kv
    return Placed(name, rate, cost.operations + cost.attention, nbytes, count, prompt=False)


def _prompt(one: Result, name: str, rate: float, cost: Work) -> Placed | None:
    """Each micro-batch reads the weights once and its sequences' caches; the head computes the last
    token alone.
    """
    if cost.chosen:
        return None
    assert cost.kv is not None and cost.attention is not None, name
    test = one.test
    count = min(test.n_ubatch, test.n_batch, test.n_prompt * test.n_parallel)
    caches = -(-count // test.n_prompt)
    each = cost.operations - cost.head + cost.attention + cost.head / test.n_prompt
    return Placed(
        name, rate, each, sum(cost.weights.values()) + caches * cost.kv, count, prompt=True
    )


def chart(roof: float | None, cache: int | None, tests: Sequence[Placed]) -> Plot:
    """The roof, of memory that gives so many bytes a second, and the tests; `cache`: bytes of the
    last one.
    """
    peak = max((one.operations for one in tests if one.prompt), default=None)
    series = [] if roof is None else [_line(roof, peak, tests)]
    for name, prompt in (("generation", False), ("prompts", True)):
        points = tuple(_point(one, roof, peak) for one in tests if one.prompt == prompt)
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
    places = [one.intensity for one in tests] + ([peak / roof] if peak else [])
    first, last = min(places) / 2, max(places) * 2
    corner = [last] if peak is None else [peak / roof, last]
    points = [Point(at, min(roof * at, peak or roof * at) / GIGA) for at in (first, *corner)]
    return Series("what memory and arithmetic allow", tuple(points), marks=False)


def _point(one: Placed, roof: float | None, peak: float | None) -> Point:
    share = "" if roof is None or one.prompt else f", {one.rate / one.attainable(roof, peak):.0%}"
    return Point(one.intensity, one.operations / GIGA, one.name, f"{figure(one.rate)} tok/s{share}")


def _says(
    roof: float | None, cache: int | None, tests: Sequence[Placed], peak: float | None
) -> str:
    """The roof in words, and how near to it generation comes."""
    if roof is None:
        return "How fast memory is read is not known here, so that no roof is drawn."
    told = [f"Memory gives {figure(roof / GIGA, 3)} GB/s"]
    if peak is not None:
        told.append(f"prompts reach {figure(peak / GIGA, 3)} G operations a second")
    shares = [one.rate / one.attainable(roof, peak) for one in tests if not one.prompt]
    if shares:
        low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
        told.append(f"generation {low if low == high else f'{low} to {high}'} of what they allow")
    cached = cache is not None and any(not one.prompt and one.nbytes <= cache for one in tests)
    more = f" All that a token reads may lie in the last cache ({size(cache or 0)}): 100% is no limit then."
    return ", ".join(told) + "." + (more if cached else "")


def bandwidth(machine: Machine) -> Rows:
    """How fast memory was read: the best round of each size, with what the slowest gave."""
    rows = []
    for one in machine.readings:
        best, slowest = one.best / GIGA, min(one.rates) / GIGA
        threads = f"{one.threads} thread{'s' * (one.threads != 1)}"
        rows.append(
            Row(
                f"{size(one.nbytes)}, {threads}",
                (Value("GB/s", best),),
                figure(best),
                (slowest, best),
            )
        )
    cache = (
        "The last cache's size is unknown."
        if machine.cache is None
        else f"The last cache holds {size(machine.cache)}."
    )
    says = f"{cache} The best round of each; whiskers reach to the slowest."
    return Rows("Reading memory", says, Axis("GB/s"), tuple(rows))
