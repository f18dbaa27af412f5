"""The HTML report of `bench`: charts of the tests, a table of all results, and facts about the
model, the machine and the build.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from llmcli import __version__
from llmcli.bench.plots import memory, roofline, speed
from llmcli.bench.roofline import MachineBandwidth
from llmcli.bench.speed import llama_bench_output
from llmcli.bench.speed.measure import (
    SpeedResult,
    average,
    build_context_options,
    standard_deviation,
)
from llmcli.bench.speed.parameter_grid import SpeedTest
from llmcli.charts.chart import Chart, Table
from llmcli.charts.html_page import ReportPage
from llmcli.charts.scale import format_number
from llmcli.hardware import host
from llmcli.planning.dry_runs import memory_plan
from llmcli.planning.dry_runs.memory_plan import MemoryPlan
from llmcli.runtime.binding import library
from llmcli.runtime.binding.placement import devices
from llmcli.units import format_size
from quant.model_file.model_header import ModelHeader

# maximum number of bars in the memory chart, and of tests in the summary
MAX_MEMORY_BARS, MAX_SUMMARY_TESTS = 12, 6


def build_charts(
    results: Sequence[SpeedResult], header: ModelHeader, bandwidth: float | None
) -> list[Chart]:
    """Build the charts of the tests. `bandwidth`: the memory bandwidth in bytes per second; None:
    unknown, so there is no roofline chart.
    """
    tests = roofline.place_tests(results, header) if bandwidth and not _ran_on_gpu(results) else []
    return [
        *([roofline.build_chart(bandwidth, host.last_cache_bytes(), tests)] if tests else []),
        *speed.build_charts(results),
    ]


def build_test_page(
    name: str,
    results: Sequence[SpeedResult],
    header: ModelHeader,
    bandwidth: float | None,
    extra_charts: Sequence[Chart] = (),
) -> ReportPage:
    """Build the report of the tests of one model. `extra_charts` are placed after the charts of the
    tests.

    The memory chart comes from dry runs of llama.cpp, which load no weights.
    """
    test_charts = build_charts(results, header, bandwidth)
    memory_chart = memory.build_chart(memory_plans(header, [result.test for result in results]))
    test_charts += [*extra_charts, *([memory_chart] if memory_chart else [])]
    subject, cpu = results[0].subject, llama_bench_output.build_row(results[0])["cpu_info"]
    return ReportPage(
        f"{name} on {cpu}",
        f"{subject.description} · {format_size(subject.nbytes)} · measured {results[0].start_time}",
        tuple(_summary(results, test_charts)),
        tuple(test_charts),
        (("All rows", result_table(results)),),
        page_facts(results, bandwidth),
    )


def build_machine_page(machine: MachineBandwidth) -> ReportPage:
    """Build the report of a memory bandwidth measurement without a model."""
    summary = (
        () if machine.bandwidth is None else (f"Memory gives {machine.bandwidth / 1e9:.1f} GB/s.",)
    )
    return ReportPage(
        f"Memory of {machine.cpu}",
        "No model was measured.",
        summary,
        (roofline.build_bandwidth_chart(machine),),
        (),
        (("Machine", _machine(machine.cpu, machine.cache_bytes, machine.bandwidth)),),
    )


def build_page(
    title: str,
    subtitle: str,
    lead: Sequence[str],
    charts: Sequence[Chart],
    tables: Sequence[tuple[str, Table]] = (),
) -> ReportPage:
    """Build the report of any other measurement from its text, charts and tables. Facts about this
    machine and build are added.
    """
    cpu = ("CPU", host.cpu_name()), ("last cache", _size(host.last_cache_bytes()))
    build = (
        ("llmcli", __version__),
        ("llama-cpp-python", library.llama_cpp_version()),
        ("backends", llama_bench_output.backend_names()),
    )
    return ReportPage(
        title,
        subtitle,
        tuple(lead),
        tuple(charts),
        tuple(tables),
        (("Machine", cpu), ("Build", build)),
    )


def memory_plans(header: ModelHeader, tests: Iterable[SpeedTest]) -> list[tuple[str, MemoryPlan]]:
    """Return the name and the memory plan of each test's context, by dry runs of llama.cpp. If
    there are more than MAX_MEMORY_BARS contexts, only the longest context of each kind is planned.
    """
    contexts = {(build_context_options(test), test.placement): None for test in tests}
    if len(contexts) > MAX_MEMORY_BARS:
        longest = sorted(contexts, key=lambda key: -key[0].n_ctx)
        contexts = dict.fromkeys(
            reversed({(replace(key[0], n_ctx=0), key[1]): key for key in longest}.values())
        )
    plans = []
    for context, placement in sorted(
        list(contexts)[:MAX_MEMORY_BARS],
        key=lambda key: (key[0].type_k, key[0].type_v, key[0].n_ctx),
    ):
        with memory_plan.open_memory_planner(header, context, placement) as planner:
            planned = planner.memory_plan()
        sequences = "" if context.n_seq_max == 1 else f", {context.n_seq_max} sequences"
        name = f"{planned.n_ctx:,} tokens, K {context.type_k}, V {context.type_v}{sequences}"
        # Leave out the overhead: after the measurements, this process uses more memory than a
        # separate run would.
        plans.append((name, replace(planned, overhead=None)))
    return list(dict(plans).items())


def result_table(results: Sequence[SpeedResult]) -> Table:
    """Build the table of all tests, with the settings that differ between them, their speed and
    their latency percentiles.
    """
    settings = speed.varying_settings(results)
    shares = next((list(result.itl_ms) for result in results if result.itl_ms), [])
    lines = []
    for result in results:
        latencies = result.itl_ms or {}
        lines.append(
            (
                result.title,
                *(str(getattr(result.test, name)) for name in settings),
                format_number(average(result.samples_ts)),
                format_number(standard_deviation(result.samples_ts), 2),
                *(format_number(latencies[share]) if latencies else "" for share in shares),
            )
        )
    setting_labels = (speed.SETTING_LABELS.get(name, name) for name in settings)
    columns = (
        "test",
        *setting_labels,
        "tokens a second",
        "±",
        *(f"{share} ms" for share in shares),
    )
    return Table(columns, tuple(lines), frozenset(range(1 + len(settings), len(columns))))


def page_facts(
    results: Sequence[SpeedResult], bandwidth: float | None
) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
    """Return the facts at the end of the report, as (heading, (label, text) pairs): the model, the
    settings that are equal in all tests, the machine and the build.
    """
    row, subject, test = (
        llama_bench_output.build_row(results[0]),
        results[0].subject,
        results[0].test,
    )
    shared = [name for name in speed.SETTING_FIELDS if name not in speed.varying_settings(results)]
    model = (
        ("file", str(Path(subject.filename))),
        ("kind", subject.description),
        ("bytes", f"{subject.nbytes:,}"),
        ("parameters", f"{subject.n_params:,}"),
    )
    settings = (
        *((speed.SETTING_LABELS.get(name, name), str(getattr(test, name))) for name in shared),
        ("repetitions", ", ".join(sorted({str(len(result.samples_ns)) for result in results}))),
    )
    machine = _machine(str(row["cpu_info"]), host.last_cache_bytes(), bandwidth)
    gpus = (("GPU", str(row["gpu_info"])),) if row["gpu_info"] else ()
    build = (
        ("llmcli", __version__),
        ("llama.cpp", str(row["build_commit"])),
        ("backends", str(row["backends"])),
    )
    return (
        ("Model", model),
        ("Settings of all rows", settings),
        ("Machine", (*machine, *gpus)),
        ("Build", build),
    )


def _machine(cpu: str, cache: int | None, bandwidth: float | None) -> tuple[tuple[str, str], ...]:
    bandwidth_text = "unknown" if bandwidth is None else f"{bandwidth / 1e9:.1f} GB/s"
    return ("CPU", cpu), ("last cache", _size(cache)), ("memory gives", bandwidth_text)


def _size(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else format_size(nbytes)


def _summary(results: Sequence[SpeedResult], charts: Sequence[Chart]) -> list[str]:
    """Return the sentences of the summary: the fastest test of each kind, the roofline, and human
    reading speeds.
    """
    best: dict[str, SpeedResult] = {}
    for result in results:
        fastest = best.setdefault(result.title, result)
        if average(result.samples_ts) > average(fastest.samples_ts):
            best[result.title] = result
    sentences = [
        f"{name}: {format_number(average(result.samples_ts))} ±"
        f" {format_number(standard_deviation(result.samples_ts), 2)} tok/s"
        for name, result in list(best.items())[:MAX_SUMMARY_TESTS]
    ]
    sentences += (
        [f"{len(best) - MAX_SUMMARY_TESTS} more tests in the table below"]
        if len(best) > MAX_SUMMARY_TESTS
        else []
    )
    sentences += llama_bench_output.usage_lines(results)
    sentences += [noise] if (noise := llama_bench_output.noise_warning(results)) else []
    sentences += [result.description for result in charts if result.title == "Roofline"]
    reading_pace = results[0].subject.reading_pace
    rates = [result.each_ts for result in results if result.tokens_ms and not result.test.n_prompt]
    return [*sentences, *([reading_pace.format_line(rates)] if reading_pace and rates else [])]


def _ran_on_gpu(results: Sequence[SpeedResult]) -> bool:
    """Return whether a GPU computed any of the tests. The roofline of the CPU then does not apply,
    and the memory bandwidth of the GPU is unknown.
    """
    has_gpu = any(device.kind in devices.GPU_KINDS for device in devices.list_devices())
    return has_gpu and any(result.test.n_gpu_layers != 0 for result in results)
