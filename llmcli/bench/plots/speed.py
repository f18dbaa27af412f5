"""Charts of speed tests: tokens per second, time per token over depth, and percentiles of the time
per token.
"""

from collections.abc import Sequence
from dataclasses import fields
from statistics import median

from llmcli.bench.speed.measure import Result, average, deviation
from llmcli.bench.speed.parameter_grid import Test
from llmcli.charts.chart import Axis, Chart, Plot, Point, Row, Rows, Rule, Series, Value
from llmcli.charts.scale import figure
from llmcli.reading_speed import PACES

RUN = ("n_prompt", "n_gen", "n_depth")  # what a test computes; the other fields are settings
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
MOST = 6  # lines of one plot; each needs its own mark


def charts(results: Sequence[Result]) -> list[Chart]:
    """Build the charts of the tests. Tests without generation have no time per token."""
    prompts = [result for result in results if not result.test.n_gen]
    generations = [result for result in results if result.tokens_ms and not result.test.n_prompt]
    mixed = [result for result in results if result.test.n_gen and result.test.n_prompt]
    drawn: list[Chart] = []
    if generations:
        drawn += [generation(generations), latency(generations), percentiles(generations)]
    if prompts:
        drawn.append(_bars("Prompts", prompts, ()))
    if mixed:
        drawn.append(_bars("Prompt and generation together", mixed, ()))
    return drawn


def varied(results: Sequence[Result]) -> list[str]:
    """Return the settings in which the tests differ."""
    return [
        name for name in SETTINGS if len({getattr(result.test, name) for result in results}) > 1
    ]


def names(results: Sequence[Result]) -> list[str]:
    """Return a name for each test: its title, and the settings in which the tests differ."""
    # the title contains n_parallel
    settings = [name for name in varied(results) if name != "n_parallel"]
    return [
        " ".join([result.title, *(setting(result.test, name) for name in settings)])
        for result in results
    ]


def setting(test: Test, name: str) -> str:
    """Return a setting as it is written after a test's name, such as `threads 2`."""
    return f"{WORDS.get(name, name)} {getattr(test, name)}"


def generation(results: Sequence[Result]) -> Rows:
    """Build the chart of generation speed, with human reading speeds as reference lines."""
    pace = results[0].subject.pace
    # people read one sequence at a time
    if pace is None or any(result.test.n_parallel > 1 for result in results):
        return _bars("Generation", results, ())
    rules = (
        Rule(pace.tokens_per_second(words), f"{name} ({words} words a minute)")
        for name, words in PACES.items()
    )
    return _bars("Generation beside reading", results, tuple(rules))


def _bars(title: str, results: Sequence[Result], rules: tuple[Rule, ...]) -> Rows:
    rows = []
    for result, name in zip(results, names(results), strict=True):
        mean, error = average(result.samples_ts), deviation(result.samples_ts)
        span = (max(mean - error, 0.0), mean + error) if error else None
        rows.append(
            Row(
                name,
                (Value("tokens a second", mean),),
                f"{figure(mean)} ± {figure(error, 2)}",
                span,
            )
        )
    says = f"{_range([average(result.samples_ts) for result in results])} tokens a second."
    if rules:
        slowest = min(average(result.samples_ts) for result in results)
        speeds = ", ".join(f"{figure(rule.at, 2)} {rule.label}" for rule in rules)
        times = figure(slowest / rules[0].at, 2)
        says += (
            f" Reading speeds in this model's tokens: {speeds}; the slowest test reaches {times}"
            " times the first."
        )
    return Rows(
        title,
        says + " Whiskers: one standard deviation.",
        Axis("tokens a second"),
        tuple(rows),
        rules=rules,
    )


def latency(results: Sequence[Result]) -> Plot:
    """Build the chart of milliseconds per token over the tokens in the cache.

    With several depths the x axis is the depth, otherwise the position in the generation.
    """
    by_setting: dict[str, list[Result]] = {}
    settings = varied(results)
    for result in results:
        labels = [setting(result.test, name) for name in settings] + ["sampled"] * (
            result.extra is not None
        )
        by_setting.setdefault(" ".join(labels), []).append(result)
    has_depths = len({result.test.n_depth for result in results}) > 1
    series: list[Series] = []
    for name, group in list(by_setting.items())[:MOST]:
        series += (
            _over_depth(name, group, len(by_setting) == 1)
            if has_depths
            else [_along(name, group[0])]
        )
    points = [point.y for result in series for point in result.points]
    shares = "Median" if len(by_setting) > 1 else "Median and 99th percentile"
    subject = f"{shares} by depth" if has_depths else "Median over the repetitions, token by token"
    omitted = f" The first {MOST} of {len(by_setting)} settings." if len(by_setting) > MOST else ""
    return Plot(
        "Time of a token",
        f"{subject}: {_range(points)} ms.{omitted}",
        Axis("tokens in the cache before it"),
        Axis("ms a token"),
        tuple(series),
    )


def _over_depth(name: str, group: Sequence[Result], alone: bool) -> list[Series]:
    ordered = sorted(group, key=lambda result: result.test.n_depth)
    shares = ("p50", "p99") if alone else ("p50",)
    return [
        Series(
            f"{name} {share}".strip(),
            tuple(
                Point(result.test.n_depth, result.itl_ms[share])
                for result in ordered
                if result.itl_ms
            ),
        )
        for share in shares
    ]


def _along(name: str, result: Result) -> Series:
    """Build the series of one generation token by token: the median of the repetitions. Many marks
    would hide the line.
    """
    count, times = result.test.n_gen, result.tokens_ms
    points = tuple(
        Point(result.test.n_depth + index, median(times[index::count])) for index in range(count)
    )
    return Series(name or result.title, points, marks=count <= MOST)


def percentiles(results: Sequence[Result]) -> Rows:
    """Build the chart of the percentiles of the time per token, p50 to p99 and the maximum."""
    rows = []
    for result, name in zip(results, names(results), strict=True):
        times = result.itl_ms
        assert times is not None, result.test
        rows.append(Row(name, tuple(Value(share, ms) for share, ms in times.items())))
    longest = max(value.value for row in rows for value in row.values)
    shortest = min(value.value for row in rows for value in row.values)
    says = (
        "Half of all tokens take p50 or less, 99 of 100 take p99 or less; the longest took"
        f" {figure(longest)} ms."
    )
    log = longest > 8 * shortest  # one slow token must not compress all other values
    return Rows(
        "Percentiles of a token's time", says, Axis("ms a token", log), tuple(rows), dots=True
    )


def _range(values: Sequence[float]) -> str:
    low, high = figure(min(values)), figure(max(values))
    return low if low == high else f"{low} to {high}"
