"""Tests as pictures: tokens a second, the time of a token over depth, its percentiles. Numbers to
charts, no more.
"""

from collections.abc import Sequence
from dataclasses import fields
from statistics import median

from llmcli.bench.charts.chart import Axis, Chart, Plot, Point, Row, Rows, Rule, Series, Value
from llmcli.bench.charts.scale import figure
from llmcli.bench.grid import Test
from llmcli.bench.kernel import Result, average, deviation
from llmcli.hardware.reading import PACES

RUN = ("n_prompt", "n_gen", "n_depth")  # what a test does; its other fields are settings
SETTINGS = tuple(field.name for field in fields(Test) if field.name not in RUN)
WORDS = {
    "n_batch": "-b",
    "n_ubatch": "-ub",
    "type_k": "K",
    "type_v": "V",
    "n_threads": "threads",
    "n_gpu_layers": "ngl",
    "flash_attn": "fa",
    "n_parallel": "np",
}
MOST = 6  # lines of one plot: as many as have marks of their own


def charts(results: Sequence[Result]) -> list[Chart]:
    """What there is to draw of tests; those that generate nothing have no time of a token."""
    prompts = [one for one in results if not one.test.n_gen]
    written = [one for one in results if one.tokens_ms and not one.test.n_prompt]
    both = [one for one in results if one.test.n_gen and one.test.n_prompt]
    found: list[Chart] = []
    if written:
        found += [generation(written), latency(written), percentiles(written)]
    if prompts:
        found.append(_bars("Prompts", prompts, ()))
    if both:
        found.append(_bars("Prompt and generation together", both, ()))
    return found


def varied(results: Sequence[Result]) -> list[str]:
    """The settings that are not the same for all."""
    return [name for name in SETTINGS if len({getattr(one.test, name) for one in results}) > 1]


def names(results: Sequence[Result]) -> list[str]:
    """What to call each test: its title, and the settings in which they differ."""
    told = [name for name in varied(results) if name != "n_parallel"]  # the title has it
    return [" ".join([one.title, *(setting(one.test, name) for name in told)]) for one in results]


def setting(test: Test, name: str) -> str:
    """A setting as it stands beside a test's name: `threads 2`."""
    return f"{WORDS.get(name, name)} {getattr(test, name)}"


def generation(results: Sequence[Result]) -> Rows:
    """Tokens a second, beside how many people read."""
    pace = results[0].subject.pace
    if pace is None or any(
        one.test.n_parallel > 1 for one in results
    ):  # somebody reads one sequence
        return _bars("Generation", results, ())
    rules = (
        Rule(pace.tokens_per_second(words), f"{name} ({words} words a minute)")
        for name, words in PACES.items()
    )
    return _bars("Generation beside reading", results, tuple(rules))


def _bars(title: str, results: Sequence[Result], rules: tuple[Rule, ...]) -> Rows:
    rows = []
    for one, name in zip(results, names(results), strict=True):
        mean, off = average(one.samples_ts), deviation(one.samples_ts)
        span = (max(mean - off, 0.0), mean + off) if off else None
        rows.append(
            Row(name, (Value("tokens a second", mean),), f"{figure(mean)} ± {figure(off, 2)}", span)
        )
    says = f"{_range([average(one.samples_ts) for one in results])} tokens a second."
    if rules:
        slow = min(average(one.samples_ts) for one in results)
        told = ", ".join(f"{figure(rule.at, 2)} {rule.label}" for rule in rules)
        times = figure(slow / rules[0].at, 2)
        says += (
            f" People, in this model's tokens: {told}; the slowest here is {times} times the first."
        )
    return Rows(
        title,
        says + " Whiskers: one standard deviation.",
        Axis("tokens a second"),
        tuple(rows),
        rules=rules,
    )


def latency(results: Sequence[Result]) -> Plot:
    """Milliseconds of a token over the tokens before it: by depth, or along the generation where
    there is one depth.
    """
    alike: dict[str, list[Result]] = {}
    told = varied(results)
    for one in results:
        kind = [setting(one.test, name) for name in told] + ["sampled"] * (one.extra is not None)
        alike.setdefault(" ".join(kind), []).append(one)
    deep = len({one.test.n_depth for one in results}) > 1
    series: list[Series] = []
    for name, group in list(alike.items())[:MOST]:
        series += _over_depth(name, group, len(alike) == 1) if deep else [_along(name, group[0])]
    points = [point.y for one in series for point in one.points]
    shares = "Median" if len(alike) > 1 else "Median and 99th percentile"
    what = f"{shares} by depth" if deep else "Median over the repetitions, token by token"
    left = f" The first {MOST} of {len(alike)} settings." if len(alike) > MOST else ""
    return Plot(
        "Time of a token",
        f"{what}: {_range(points)} ms.{left}",
        Axis("tokens in the cache before it"),
        Axis("ms a token"),
        tuple(series),
    )


def _over_depth(name: str, group: Sequence[Result], alone: bool) -> list[Series]:
    ordered = sorted(group, key=lambda one: one.test.n_depth)
    shares = ("p50", "p99") if alone else ("p50",)
    return [
        Series(
            f"{name} {share}".strip(),
            tuple(Point(one.test.n_depth, one.itl_ms[share]) for one in ordered if one.itl_ms),
        )
        for share in shares
    ]


def _along(name: str, one: Result) -> Series:
    """A generation token by token: the median of the repetitions, without marks, they would hide
    the line.
    """
    count, times = one.test.n_gen, one.tokens_ms
    points = tuple(Point(one.test.n_depth + at, median(times[at::count])) for at in range(count))
    return Series(name or one.title, points, marks=count <= MOST)


def percentiles(results: Sequence[Result]) -> Rows:
    """How evenly tokens come: p50 to p99 and the longest."""
    rows = []
    for one, name in zip(results, names(results), strict=True):
        times = one.itl_ms
        assert times is not None, one.test
        rows.append(Row(name, tuple(Value(share, ms) for share, ms in times.items())))
    longest = max(value.value for row in rows for value in row.values)
    shortest = min(value.value for row in rows for value in row.values)
    says = f"Half of all tokens take p50 or less, 99 of 100 p99 or less; the longest took {figure(longest)} ms."
    log = longest > 8 * shortest  # one long token must not press all others together
    return Rows(
        "Percentiles of a token's time", says, Axis("ms a token", log), tuple(rows), dots=True
    )


def _range(values: Sequence[float]) -> str:
    low, high = figure(min(values)), figure(max(values))
    return low if low == high else f"{low} to {high}"
