"""Charts of results: which tests are drawn, and that the drawn numbers are those of the results."""

from dataclasses import replace
from pathlib import Path

import pytest

from llmcli.bench import report_page
from llmcli.bench.cost.memory_bandwidth import BandwidthReading
from llmcli.bench.plots import memory, pairs, roofline, speed
from llmcli.bench.roofline import MachineBandwidth
from llmcli.bench.speed import parameter_grid
from llmcli.bench.speed.measure import ModelUnderTest, SpeedResult
from llmcli.charts import terminal_chart
from llmcli.charts.chart import Plot, RowChart
from llmcli.planning.dry_runs.memory_plan import DeviceMemory, MemoryPlan
from llmcli.reading_speed import ReadingPace
from quant.model_file import model_header, read_header
from tests.quant import tiny_gguf

BASE = parameter_grid.SpeedTest(0, 0, 0, 512, 512, "f16", "f16", 2, 0, "auto")
SUBJECT = ModelUnderTest("/models/<b>.gguf", "llama <b>", 1000, 2000, ReadingPace(1.5))


def result(ms: float = 10.0, repetitions: int = 3, **changes: object) -> SpeedResult:
    """Return the result of a test whose tokens each took `ms`, except for the last token, which
    took twice as long.
    """
    test = replace(BASE, **changes)
    tokens = tuple([ms] * (test.n_gen - 1) + [2 * ms]) * repetitions if test.n_gen else ()
    count = test.n_prompt + test.n_gen
    return SpeedResult(
        SUBJECT, test, "2026-01-01T00:00:00Z", tuple([int(count * ms * 1e6)] * repetitions), tokens
    )


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory):
    return read_header.read_header(
        tiny_gguf.llama(tmp_path_factory.mktemp("pictures") / "tiny.gguf", layers=2)
    )


def by_title(charts) -> dict[str, Plot | RowChart]:
    return {chart.title: chart for chart in charts}


def test_the_generation_chart_has_reading_speeds_as_lines():
    chart = speed.build_generation_chart([result(n_gen=8), result(20.0, n_gen=8, n_depth=64)])
    assert [(row.label, row.values[0].value) for row in chart.rows] == [
        ("tg8", 100.0),
        ("tg8 @ d64", 50.0),
    ]
    # 250, 450 and 700 words per minute, with 1.5 tokens per word
    assert [rule.position for rule in chart.reference_lines] == [6.25, 11.25, 17.5]
    assert chart.reference_lines[0].label == "silent reading (250 words a minute)"
    assert "8 times the first" in chart.description


def test_row_names_contain_the_differing_settings():
    results = [
        result(n_gen=4, n_threads=1, type_k="q8_0"),
        result(n_gen=4, n_threads=2, type_k="q8_0"),
    ]
    assert speed.test_names(results) == ["tg4 threads 1", "tg4 threads 2"]
    assert speed.test_names(results[:1]) == ["tg4"]


def test_the_latency_chart_uses_depth_as_its_axis_if_there_are_several():
    chart = speed.build_latency_chart(
        [result(10 + depth / 10, n_gen=4, n_depth=depth) for depth in (100, 0, 50)]
    )
    assert [series.name for series in chart.series] == ["p50", "p99"]
    assert [(point.x, point.y) for point in chart.series[0].points] == [
        (0, 10),
        (50, 15),
        (100, 20),
    ]
    by_position = speed.build_latency_chart([result(10, n_gen=4, n_depth=7)])
    assert [(point.x, point.y) for point in by_position.series[0].points] == [
        (7, 10),
        (8, 10),
        (9, 10),
        (10, 20),
    ]


def test_the_number_of_lines_in_a_plot_is_limited():
    results = [
        result(n_gen=4, n_depth=depth, n_threads=count)
        for depth in (0, 8)
        for count in range(1, 10)
    ]
    chart = speed.build_latency_chart(results)
    assert len(chart.series) == 6
    assert "first 6 of 9" in chart.description


def test_the_percentile_chart_shows_the_results_percentiles():
    chart = speed.build_percentile_chart([result(n_gen=8), result(1.0, n_gen=8, n_depth=4)])
    assert [value.name for value in chart.rows[0].values] == ["p50", "p90", "p95", "p99", "max"]
    assert [value.value for value in chart.rows[0].values] == [10, 20, 20, 20, 20]
    assert chart.axis.is_log  # 1 to 20 ms


@pytest.mark.parametrize(
    "kinds", [[{"n_prompt": 8}], [{"n_gen": 1}], [{"n_prompt": 8, "n_gen": 8}], [{"n_gen": 8}]]
)
@pytest.mark.parametrize("repetitions", [1, 3])
def test_every_kind_of_test_has_a_chart(kinds, repetitions, header):
    results = [result(repetitions=repetitions, **changes) for changes in kinds]
    assert report_page.build_charts(results, header, None)
    assert report_page.result_table(results).rows[0][0] == results[0].test.name


def test_the_roofline_is_the_lower_of_the_memory_and_compute_limits(header):
    tests = roofline.place_tests([result(n_gen=8), result(1.0, n_prompt=64)], header)
    prompt, generation = sorted(tests, key=lambda test: not test.is_prompt)
    assert prompt.intensity > 16 * generation.intensity
    chart = roofline.build_chart(1e9, None, tests)
    line = chart.series[0].points
    ridge = prompt.operations_per_second / 1e9
    assert (
        [point.x for point in line][1]
        == pytest.approx(ridge)
        == pytest.approx(chart.reference_lines[0].position)
    )
    assert [point.y for point in line][1:] == pytest.approx(
        [prompt.operations_per_second / 1e9] * 2
    )
    assert line[0].y == pytest.approx(line[0].x)
    share = generation.operations_per_second / min(
        1e9 * generation.intensity, prompt.operations_per_second
    )
    assert generation.rate / generation.attainable_rate(
        1e9, prompt.operations_per_second
    ) == pytest.approx(share)
    assert [point.label.split(":")[0] for series in chart.series for point in series.points][
        3:
    ] == ["tg8", "pp64"]
    assert "last-level cache" in roofline.build_chart(1e9, 1 << 40, tests).description


def test_parallel_sequences_share_the_weights_but_not_the_kv_caches(
    header: model_header.ModelHeader,
):
    tests = [result(n_gen=8, n_depth=64, n_parallel=count) for count in (1, 4)]
    single, four = roofline.place_tests(tests, header)
    weights = (
        2 * single.bytes_per_pass
        - roofline.place_tests([result(n_gen=8, n_depth=132)], header)[0].bytes_per_pass
    )  # 68 and 136 cells
    assert four.bytes_per_pass == weights + 4 * (single.bytes_per_pass - weights)
    assert four.intensity == pytest.approx(4 * single.operations_per_token / four.bytes_per_pass)
    one, two = roofline.place_tests(
        [result(n_prompt=32, n_parallel=count) for count in (1, 2)], header
    )
    assert (one.tokens_per_pass, two.tokens_per_pass) == (32, 64)
    assert weights < one.bytes_per_pass < two.bytes_per_pass


def test_without_a_bandwidth_there_is_no_roofline(header):
    tests = roofline.place_tests([result(n_gen=8)], header)
    chart = roofline.build_chart(None, None, tests)
    assert [series.name for series in chart.series] == ["generation"]
    assert "is unknown" in chart.description
    assert "Roofline" not in by_title(report_page.build_charts([result(n_gen=8)], header, None))


def test_bandwidth_bars_extend_to_the_slowest_round():
    machine = MachineBandwidth(
        "cpu",
        1 << 20,
        (BandwidthReading(1 << 26, 1, (4e9, 5e9)), BandwidthReading(1 << 27, 2, (8e9, 6e9))),
    )
    chart = roofline.build_bandwidth_chart(machine)
    assert [(row.label, row.values[0].value, row.value_range) for row in chart.rows] == [
        ("64.0 MiB, 1 thread", 5.0, (4.0, 5.0)),
        ("128.0 MiB, 2 threads", 8.0, (6.0, 8.0)),
    ]


def share(available: int | None, **changes: int | None) -> DeviceMemory:
    parts = {
        "weights": 90 << 20,
        "repacked": 10 << 20,
        "kv": 20 << 20,
        "compute": 5 << 20,
        **changes,
    }
    return DeviceMemory("CPU", output=1 << 20, droppable=0, available=available, **parts)  # type: ignore[arg-type]


def test_the_memory_chart_shows_every_part_and_the_free_memory():
    near, far = (
        MemoryPlan(512, (share(200 << 20),), None, 30 << 20),
        MemoryPlan(512, (share(9 << 30),), None, None),
    )
    chart = memory.build_chart([("near", near), ("far", far)])
    assert [(part.name, part.value) for part in chart.rows[0].values] == [
        ("weights", 90),
        ("weights in another layout", 10),
        ("KV cache", 20),
        ("compute buffers", 5),
        ("output buffer", 1),
        ("interpreter, libraries", 30),
        ("free", 74),
    ]
    # a large amount of free memory would make the other parts too small to see
    assert "free" not in [part.name for part in chart.rows[1].values]
    assert "8.9 GiB free" in chart.rows[1].note
    assert chart.description.startswith("It fits.")


def test_the_memory_chart_names_unknown_parts_and_missing_memory():
    chart = memory.build_chart([("a", MemoryPlan(512, (share(None, compute=None),), None, None))])
    assert "compute buffers: unknown" in chart.rows[0].note
    assert chart.description.startswith("Whether it fits is not known.")
    full = memory.build_chart([("a", MemoryPlan(512, (share(1 << 20),), None, None))])
    assert full.description.startswith("It does not fit.")
    assert "too much" in full.rows[0].note


def test_ratios_are_drawn_around_1_with_their_intervals():
    ratios = [
        pairs.SpeedRatio("a", 1.02, 1.01, 1.03),
        pairs.SpeedRatio("b", 0.9, 0.0, float("inf")),
        pairs.SpeedRatio("c", 0.97),
    ]
    chart = pairs.build_chart("t", "s", "B / A", ratios)
    assert [row.value_range for row in chart.rows] == [(1.01, 1.03), None, None]
    assert [rule.position for rule in chart.reference_lines] == [1.0]
    assert not chart.axis.from_zero
    lines = terminal_chart.render_text(chart, 60).split("\n")
    assert lines[1].index("●") > lines[3].index("●") > lines[2].index("●")
    assert lines[2].index("│") == lines[3].index("│")  # 1


def test_equal_contexts_are_planned_once(header: model_header.ModelHeader):
    tests = [
        replace(BASE, n_gen=8),
        replace(BASE, n_gen=8),
        replace(BASE, n_prompt=300),
        replace(BASE, n_gen=8, type_k="q8_0"),
    ]
    plans = report_page.memory_plans(header, tests)
    assert [name for name, _ in plans] == [
        "256 tokens, K f16, V f16",
        "512 tokens, K f16, V f16",
        "256 tokens, K q8_0, V f16",
    ]
    assert all(plan.overhead is None and plan.sums.kv for _, plan in plans)


def test_the_summary_mentions_noise_and_omitted_tests(header: model_header.ModelHeader):
    slow = replace(result(n_gen=8), samples_ns=(10**8, 2 * 10**8, 10**8))
    lead = report_page.build_test_page(
        "x", [slow, *(result(n_gen=count) for count in range(9, 20))], header, None
    ).lead
    assert "6 more tests in the table below" in lead
    assert any("other programs use this machine" in line for line in lead)


def test_a_model_with_an_unknown_cache_size_has_no_roofline(tmp_path: Path):
    header = read_header.read_header(tiny_gguf.mamba(tmp_path / "mamba.gguf"))
    page = report_page.build_test_page("mamba", [result(n_gen=8), result(n_prompt=16)], header, 1e9)
    assert "Roofline" not in by_title(page.charts)
    assert "Memory" in by_title(page.charts)


def test_the_page_contains_all_rows_and_the_machine(
    header: model_header.ModelHeader, tmp_path: Path
):
    results = [result(n_gen=8, n_threads=count) for count in (1, 2)]
    page = report_page.build_test_page("<i>", results, header, 1e9)
    assert [chart.title for chart in page.charts] == [
        "Roofline",
        "Generation and reading speed",
        "Time of a token",
        "Percentiles of a token's time",
        "Memory",
    ]
    (_, table), facts = page.tables[0], dict(page.facts)
    assert table.columns[:4] == ("test", "threads", "tokens a second", "±")
    assert [row[:3] for row in table.rows] == [("tg8", "1", "100"), ("tg8", "2", "100")]
    assert ("file", "/models/<b>.gguf") in facts["Model"]
    assert ("memory gives", "1.0 GB/s") in facts["Machine"]
    assert "threads" not in dict(facts["Settings of all rows"])
