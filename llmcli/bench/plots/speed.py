"""Charts of speed tests: tokens per second, and the time per token by depth and as percentiles."""

from collections.abc import Sequence
from dataclasses import fields
from statistics import median

from llmcli.bench.speed.measure import SpeedResult, average, standard_deviation
from llmcli.bench.speed.parameter_grid import SpeedTest
from llmcli.charts.chart import (
    Axis,
    Chart,
    ChartRow,
    NamedValue,
    Plot,
    Point,
    ReferenceLine,
    RowChart,
    Series,
)
from llmcli.charts.scale import format_number
from llmcli.reading_speed import READING_PACES

# fields of a test that define what it computes; all other fields are settings
WORKLOAD_FIELDS = ("n_prompt", "n_gen", "n_depth")
SETTING_FIELDS = tuple(
    field.name for field in fields(SpeedTest) if field.name not in WORKLOAD_FIELDS
)
SETTING_LABELS = {
    "n_batch": "-b",
    "n_ubatch": "-ub",
    "type_k": "K",
    "type_v": "V",
    "n_threads": "threads",
    "n_gpu_layers": "ngl",
    "flash_attn": "fa",
    "n_parallel": "np",
}
MAX_LINES = 6  # maximum number of lines in a plot, since there are only so many distinct marks


def build_charts(results: Sequence[SpeedResult]) -> list[Chart]:
    """Build the charts of the tests. Only tests with generation appear in the charts of the time
    per token.
    """
    prompts = [result for result in results if not result.test.n_gen]
    generations = [result for result in results if result.tokens_ms and not result.test.n_prompt]
    mixed = [result for result in results if result.test.n_gen and result.test.n_prompt]
    charts: list[Chart] = []
    if generations:
        charts += [
            build_generation_chart(generations),
            build_latency_chart(generations),
            build_percentile_chart(generations),
        ]
    if prompts:
        charts.append(_speed_chart("Prompts", prompts, ()))
    if mixed:
        charts.append(_speed_chart("Prompt and generation together", mixed, ()))
    return charts


def varying_settings(results: Sequence[SpeedResult]) -> list[str]:
    """Return the names of the settings whose values differ between the tests."""
    return [
        name
        for name in SETTING_FIELDS
        if len({getattr(result.test, name) for result in results}) > 1
    ]


def test_names(results: Sequence[SpeedResult]) -> list[str]:
    """Return a name for each test: its title, followed by its values of the settings that differ
    between the tests.
    """
    # n_parallel is part of the title
    settings = [name for name in varying_settings(results) if name != "n_parallel"]
    return [
        " ".join([result.title, *(format_setting(result.test, name) for name in settings)])
        for result in results
    ]


def format_setting(test: SpeedTest, name: str) -> str:
    """Return one setting of a test as text, such as `threads 2`."""
    return f"{SETTING_LABELS.get(name, name)} {getattr(test, name)}"


def build_generation_chart(results: Sequence[SpeedResult]) -> RowChart:
    """Build the chart of generation speed. Human reading speeds are drawn as reference lines."""
    pace = results[0].subject.reading_pace
    # a person reads only one sequence at a time
    if pace is None or any(result.test.n_parallel > 1 for result in results):
        return _speed_chart("Generation", results, ())
    rules = (
        ReferenceLine(pace.tokens_per_second(words), f"{name} ({words} words a minute)")
        for name, words in READING_PACES.items()
    )
    return _speed_chart("Generation and reading speed", results, tuple(rules))


def _speed_chart(
    title: str, results: Sequence[SpeedResult], rules: tuple[ReferenceLine, ...]
) -> RowChart:
    rows = []
    for result, name in zip(results, test_names(results), strict=True):
        mean, error = average(result.samples_ts), standard_deviation(result.samples_ts)
        span = (max(mean - error, 0.0), mean + error) if error else None
        rows.append(
            ChartRow(
                name,
                (NamedValue("tokens a second", mean),),
                f"{format_number(mean)} ± {format_number(error, 2)}",
                span,
            )
        )
    description = f"{_range([average(result.samples_ts) for result in results])} tokens a second."
    if rules:
        slowest = min(average(result.samples_ts) for result in results)
        speeds = ", ".join(f"{format_number(rule.position, 2)} {rule.label}" for rule in rules)
        times = format_number(slowest / rules[0].position, 2)
        description += (
            f" Reading speeds in this model's tokens: {speeds}; the slowest test reaches {times}"
            " times the first."
        )
    return RowChart(
        title,
        description + " Whiskers: one standard deviation.",
        Axis("tokens a second"),
        tuple(rows),
        reference_lines=rules,
    )


def build_latency_chart(results: Sequence[SpeedResult]) -> Plot:
    """Build the chart of the milliseconds per token, over the number of tokens in the KV cache.

    If the tests have several depths, the x axis is the depth. Otherwise, it is the position of each
    token.
    """
    by_setting: dict[str, list[SpeedResult]] = {}
    settings = varying_settings(results)
    for result in results:
        labels = [format_setting(result.test, name) for name in settings] + ["sampled"] * (
            result.sampling_cost is not None
        )
        by_setting.setdefault(" ".join(labels), []).append(result)
    has_depths = len({result.test.n_depth for result in results}) > 1
    series: list[Series] = []
    for name, group in list(by_setting.items())[:MAX_LINES]:
        series += (
            _depth_lines(name, group, len(by_setting) == 1)
            if has_depths
            else [_token_line(name, group[0])]
        )
    points = [point.y for result in series for point in result.points]
    shares = "Median" if len(by_setting) > 1 else "Median and 99th percentile"
    subject = f"{shares} by depth" if has_depths else "Median over the repetitions, token by token"
    omitted = (
        f" The first {MAX_LINES} of {len(by_setting)} settings."
        if len(by_setting) > MAX_LINES
        else ""
    )
    return Plot(
        "Time of a token",
        f"{subject}: {_range(points)} ms.{omitted}",
        Axis("tokens in the cache before it"),
        Axis("ms a token"),
        tuple(series),
    )


def _depth_lines(name: str, group: Sequence[SpeedResult], is_only_setting: bool) -> list[Series]:
    ordered = sorted(group, key=lambda result: result.test.n_depth)
    shares = ("p50", "p99") if is_only_setting else ("p50",)
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


def _token_line(name: str, result: SpeedResult) -> Series:
    """Build the line of one generation test. Each token has the median time over the repetitions.
    With many tokens there are no marks, because they would hide the line.
    """
    count, times = result.test.n_gen, result.tokens_ms
    points = tuple(
        Point(result.test.n_depth + index, median(times[index::count])) for index in range(count)
    )
    return Series(name or result.title, points, marks=count <= MAX_LINES)


def build_percentile_chart(results: Sequence[SpeedResult]) -> RowChart:
    """Build the chart of the percentiles of the time per token: p50 to p99, and the maximum."""
    rows = []
    for result, name in zip(results, test_names(results), strict=True):
        times = result.itl_ms
        assert times is not None, result.test
        rows.append(ChartRow(name, tuple(NamedValue(share, ms) for share, ms in times.items())))
    longest = max(value.value for row in rows for value in row.values)
    shortest = min(value.value for row in rows for value in row.values)
    description = (
        "Half of all tokens take p50 or less, 99 of 100 take p99 or less; the longest took"
        f" {format_number(longest)} ms."
    )
    # use a log axis, so that one slow token does not compress all other values
    is_log = longest > 8 * shortest
    return RowChart(
        "Percentiles of a token's time",
        description,
        Axis("ms a token", is_log),
        tuple(rows),
        draws_marks=True,
    )


def _range(values: Sequence[float]) -> str:
    low, high = format_number(min(values)), format_number(max(values))
    return low if low == high else f"{low} to {high}"
