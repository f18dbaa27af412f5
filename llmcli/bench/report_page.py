"""What was measured as a report: the pictures that the tests allow, all rows, machine and build.
See charts/page.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from llmcli import __version__
from llmcli.bench.plots import memory, roofline, speed
from llmcli.bench.roofline import Machine
from llmcli.bench.speed import llama_bench_output
from llmcli.bench.speed.measure import Result, average, deviation, options
from llmcli.bench.speed.parameter_grid import Test
from llmcli.charts.chart import Chart, Table
from llmcli.charts.html_page import Page
from llmcli.charts.scale import figure
from llmcli.hardware import host
from llmcli.planning import memory_plan
from llmcli.planning.memory_plan import Receipt
from llmcli.runtime.binding import devices, library
from llmcli.units import size
from quant.model_file.model_header import ModelHeader

MOST, LEAD = 12, 6  # bars of memory, tests that are named first


def charts(results: Sequence[Result], header: ModelHeader, bandwidth: float | None) -> list[Chart]:
    """The pictures that tests allow; above them the roof of a memory that gives so many bytes a
    second.
    """
    tests = roofline.placed(results, header) if bandwidth and not _elsewhere(results) else []
    return [
        *([roofline.chart(bandwidth, host.last_cache(), tests)] if tests else []),
        *speed.charts(results),
    ]


def of_tests(
    name: str,
    results: Sequence[Result],
    header: ModelHeader,
    bandwidth: float | None,
    more: Sequence[Chart] = (),
) -> Page:
    """The report of tests of one model, called `name`, with `more` pictures behind those of the
    tests; rehearses their contexts (no weights are loaded).
    """
    drawn = charts(results, header, bandwidth)
    held = memory.chart(receipts(header, [one.test for one in results]))
    drawn += [*more, *([held] if held else [])]
    about, cpu = results[0].subject, llama_bench_output.document(results[0])["cpu_info"]
    return Page(
        f"{name} on {cpu}",
        f"{about.kind} · {size(about.nbytes)} · measured {results[0].began}",
        tuple(_lead(results, drawn)),
        tuple(drawn),
        (("All rows", rows(results)),),
        facts(results, bandwidth),
    )


def of_machine(machine: Machine) -> Page:
    """The report where only memory was read."""
    told = () if machine.roof is None else (f"Memory gives {machine.roof / 1e9:.1f} GB/s.",)
    return Page(
        f"Memory of {machine.cpu}",
        "No model was measured.",
        told,
        (roofline.bandwidth(machine),),
        (),
        (("Machine", _machine(machine.cpu, machine.cache, machine.roof)),),
    )


def of_others(
    title: str,
    about: str,
    lead: Sequence[str],
    drawn: Sequence[Chart],
    tables: Sequence[tuple[str, Table]] = (),
) -> Page:
    """A report of anything else that was measured on this machine."""
    cpu = ("CPU", host.cpu_name()), ("last cache", _size(host.last_cache()))
    build = (
        ("llmcli", __version__),
        ("llama-cpp-python", library.llama_cpp_version()),
        ("backends", llama_bench_output.backends()),
    )
    return Page(
        title, about, tuple(lead), tuple(drawn), tuple(tables), (("Machine", cpu), ("Build", build))
    )


def receipts(header: ModelHeader, tests: Iterable[Test]) -> list[tuple[str, Receipt]]:
    """What the contexts of tests hold, as llama.cpp's dry run tells; of many the longest of each
    kind.
    """
    wanted = {(options(test), test.n_gpu_layers): None for test in tests}
    if len(wanted) > MOST:
        longest = sorted(wanted, key=lambda one: -one[0].n_ctx)
        wanted = dict.fromkeys(
            reversed({(replace(one[0], n_ctx=0), one[1]): one for one in longest}.values())
        )
    found = []
    for context, layers in sorted(
        list(wanted)[:MOST], key=lambda one: (one[0].type_k, one[0].type_v, one[0].n_ctx)
    ):
        with memory_plan.planner(header, context, layers) as planner:
            told = planner.receipt()
        several = "" if context.n_seq_max == 1 else f", {context.n_seq_max} sequences"
        name = f"{told.n_ctx:,} tokens, K {context.type_k}, V {context.type_v}{several}"
        # This process has measured before: what it holds besides is not what a run of its own
        # would.
        found.append((name, replace(told, overhead=None)))
    return list(dict(found).items())


def rows(results: Sequence[Result]) -> Table:
    """All tests: the settings in which they differ, speed, percentiles."""
    told = speed.varied(results)
    shares = next((list(one.itl_ms) for one in results if one.itl_ms), [])
    lines = []
    for one in results:
        times = one.itl_ms or {}
        lines.append(
            (
                one.title,
                *(str(getattr(one.test, name)) for name in told),
                figure(average(one.samples_ts)),
                figure(deviation(one.samples_ts), 2),
                *(figure(times[share]) if times else "" for share in shares),
            )
        )
    settings = (speed.WORDS.get(name, name) for name in told)
    columns = ("test", *settings, "tokens a second", "±", *(f"{share} ms" for share in shares))
    return Table(columns, tuple(lines), frozenset(range(1 + len(told), len(columns))))


def facts(
    results: Sequence[Result], bandwidth: float | None
) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
    """Model, settings that all tests share, machine, build."""
    told, about, test = llama_bench_output.document(results[0]), results[0].subject, results[0].test
    same = [name for name in speed.SETTINGS if name not in speed.varied(results)]
    model = (
        ("file", str(Path(about.filename))),
        ("kind", about.kind),
        ("bytes", f"{about.nbytes:,}"),
        ("parameters", f"{about.n_params:,}"),
    )
    settings = (
        *((speed.WORDS.get(name, name), str(getattr(test, name))) for name in same),
        ("repetitions", ", ".join(sorted({str(len(one.samples_ns)) for one in results}))),
    )
    machine = _machine(str(told["cpu_info"]), host.last_cache(), bandwidth)
    gpus = (("GPU", str(told["gpu_info"])),) if told["gpu_info"] else ()
    build = (
        ("llmcli", __version__),
        ("llama.cpp", str(told["build_commit"])),
        ("backends", str(told["backends"])),
    )
    return (
        ("Model", model),
        ("Settings of all rows", settings),
        ("Machine", (*machine, *gpus)),
        ("Build", build),
    )


def _machine(cpu: str, cache: int | None, bandwidth: float | None) -> tuple[tuple[str, str], ...]:
    speed = "unknown" if bandwidth is None else f"{bandwidth / 1e9:.1f} GB/s"
    return ("CPU", cpu), ("last cache", _size(cache)), ("memory gives", speed)


def _size(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else size(nbytes)


def _lead(results: Sequence[Result], drawn: Sequence[Chart]) -> list[str]:
    """What to remember: each kind of test in a line, the roof, reading."""
    best: dict[str, Result] = {}
    for one in results:
        held = best.setdefault(one.title, one)
        if average(one.samples_ts) > average(held.samples_ts):
            best[one.title] = one
    told = [
        f"{name}: {figure(average(one.samples_ts))} ± {figure(deviation(one.samples_ts), 2)} tok/s"
        for name, one in list(best.items())[:LEAD]
    ]
    told += [f"{len(best) - LEAD} more tests stand below"] if len(best) > LEAD else []
    told += [noise] if (noise := llama_bench_output.noise(results)) else []
    told += [one.says for one in drawn if one.title == "Roofline"]
    read = results[0].subject.pace
    rates = [one.each_ts for one in results if one.tokens_ms and not one.test.n_prompt]
    return [*told, *([read.line(rates)] if read and rates else [])]


def _elsewhere(results: Sequence[Result]) -> bool:
    """Whether a GPU computed: what its memory gives is not known, and the CPU's roof is not above
    it.
    """
    gpus = any(one.kind in devices.GPU_KINDS for one in devices.list_devices())
    return gpus and any(one.test.n_gpu_layers != 0 for one in results)
