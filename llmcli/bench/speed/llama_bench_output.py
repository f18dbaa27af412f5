"""Bench results in llama-bench's four formats: md, csv, json and jsonl. Each row has llama-bench's
fields in llama-bench's order, followed by fields that only llmcli has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from llmcli.bench.result_rows import format_csv, format_json, format_json_lines
from llmcli.bench.speed.measure import SamplingCost, SpeedResult, average, standard_deviation
from llmcli.bench.speed.parameter_grid import SpeedTest
from llmcli.hardware import host
from llmcli.hardware.gpu_usage import format_usage, merge_samples
from llmcli.runtime.binding import library
from llmcli.runtime.binding.contexts.cache_types import FLASH_MODES
from llmcli.runtime.binding.kernels import gemm
from llmcli.runtime.binding.placement import devices

# A setting gets a column in the table if it differs from this default in any row.
DEFAULT_SETTINGS: dict[str, Any] = {
    "n_batch": 2048,
    "n_ubatch": 512,
    "type_k": "f16",
    "type_v": "f16",
    "flash_attn": -1,
    "n_parallel": 1,
    "sampling": False,
}
COLUMN_TITLES = {
    "n_threads": "threads",
    "n_gpu_layers": "ngl",
    "flash_attn": "fa",
    "n_parallel": "np",
}
# If the slowest repetition takes this fraction longer than the fastest, a warning is printed,
# because other programs probably disturbed the measurement.
NOISY_SPREAD = 0.1
# fields that contain lists or objects, which CSV cannot contain
NON_CSV_FIELDS = ("samples_ns", "samples_ts", "itl_ms", "sampling_extra", "reading", "gpus")
FLASH_NAMES = {value: word for word, value in FLASH_MODES.items()}


def build_row(result: SpeedResult) -> dict[str, Any]:
    """Return a result as a JSON object with llama-bench's fields and additional ones. Unknown
    values are null.
    """
    test, subject = result.test, result.subject
    gpus = [
        device.description for device in devices.list_devices() if device.kind in ("gpu", "igpu")
    ]
    times = [float(ns) for ns in result.samples_ns]
    rates = result.samples_ts
    return {
        "build_commit": f"llama-cpp-python-{library.llama_cpp_version()}",
        "build_number": 0,
        "cpu_info": host.cpu_name(),
        "gpu_info": ", ".join(gpus),
        "backends": backend_names(),
        "model_filename": subject.filename,
        "model_type": subject.description,
        "model_size": subject.nbytes,
        "model_n_params": subject.n_params,
        "n_batch": test.n_batch,
        "n_ubatch": test.n_ubatch,
        "n_threads": test.n_threads,
        "type_k": test.type_k,
        "type_v": test.type_v,
        "n_gpu_layers": test.n_gpu_layers,
        "flash_attn": FLASH_MODES[test.flash_attn],
        "n_prompt": test.n_prompt,
        "n_gen": test.n_gen,
        "n_depth": test.n_depth,
        "test_time": result.start_time,
        "avg_ns": round(average(times)),
        "stddev_ns": round(standard_deviation(times)),
        "avg_ts": round(average(rates), 6),
        "stddev_ts": round(standard_deviation(rates), 6),
        "samples_ns": list(result.samples_ns),
        "samples_ts": [round(rate, 4) for rate in rates],
        "n_parallel": test.n_parallel,
        "avg_ts_each": round(result.each_ts, 6),
        "sampling": result.sampling_cost is not None,
        "sampling_extra": _sampling_fields(result),
        "itl_ms": result.itl_ms,
        "read_bandwidth_bytes_per_second": result.bandwidth,
        "roofline_fraction": result.bandwidth_share,
        "reading": subject.reading_pace.build_document(result.each_ts)
        if subject.reading_pace and _only_generates(test)
        else None,
        "gpus": [asdict(gpu) for gpu in result.gpus] or None,
        "id": result.id,
    }


def _sampling_fields(result: SpeedResult) -> dict[str, Any] | None:
    """Return the JSON object of the time per token that sampling adds: milliseconds with their 95 %
    interval, and the fraction of the time of decoding alone. None if sampling was not measured.
    """
    extra = result.sampling_cost
    if extra is None:
        return None
    return {"ms_per_token": extra.ms, "low": extra.low, "high": extra.high, "share": extra.share}


def _only_generates(test: SpeedTest) -> bool:
    """Return whether the test generates tokens without a prompt. Only then is its speed compared
    with human reading.
    """
    return test.n_gen > 0 and not test.n_prompt


def backend_names() -> str:
    """Return the kinds of devices that this build uses, as llama-bench prints them: "CPU", or for
    example "CUDA". "BF16" is added if llmcli's own bf16 matrix products are available.
    """
    accelerators = [device for device in devices.list_devices() if device.kind != "cpu"]
    names = [
        accelerator.name.rstrip("0123456789")
        if accelerator.kind in devices.GPU_KINDS
        else accelerator.name
        for accelerator in accelerators
    ]
    names += ["BF16"] if gemm.is_available() else []
    return ",".join(dict.fromkeys(names)) or "CPU"


def usage_lines(results: Sequence[SpeedResult]) -> list[str]:
    """Return a line about each NVIDIA GPU, with means over the tests; empty without NVML."""
    return [format_usage(gpu) for gpu in merge_samples([result.gpus for result in results])]


def format_results(results: Sequence[SpeedResult], output_format: str) -> str:
    """Format all results in one of llama-bench's formats: "md", "csv", "json" or "jsonl"."""
    rows = [build_row(result) for result in results]
    if output_format == "json":
        return format_json(rows)
    if output_format == "jsonl":
        return format_json_lines(rows)
    if output_format == "csv":
        return format_csv([_csv_fields(row) for row in rows])
    return _markdown(rows, results)


def _csv_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in NON_CSV_FIELDS}


def _markdown(rows: Sequence[dict[str, Any]], results: Sequence[SpeedResult]) -> str:
    lead_name = "n_threads" if devices.free_gpu_bytes() is None else "n_gpu_layers"
    second_name = "n_gpu_layers" if lead_name == "n_threads" else "n_threads"
    shown_settings = [
        name for name, value in DEFAULT_SETTINGS.items() if any(row[name] != value for row in rows)
    ]
    shown_settings += [second_name] if len({row[second_name] for row in rows}) > 1 else []
    each = ["t/s each"] if "n_parallel" in shown_settings else []
    names = [COLUMN_TITLES[lead_name], *(COLUMN_TITLES.get(name, name) for name in shown_settings)]
    header = ["model", "size", "params", "backend", *names, "test", "t/s", *each]
    table = [
        [
            row["model_type"],
            _size(row["model_size"]),
            _count(row["model_n_params"]),
            row["backends"],
            str(row[lead_name]),
            *(_cell(name, row[name]) for name in shown_settings),
            result.test.name,
            f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}",
            *(f"{result.each_ts:.2f}" for _ in each),
        ]
        for row, result in zip(rows, results, strict=True)
    ]
    widths = [max(map(len, column)) for column in zip(header, *table, strict=True)]
    left_aligned = {0, 3}
    rule = [("-" * w if i in left_aligned else "-" * (w - 1) + ":") for i, w in enumerate(widths)]
    lines = [
        "| "
        + " | ".join(
            c.ljust(w) if i in left_aligned else c.rjust(w)
            for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        )
        + " |"
        for cells in (header, rule, *table)
    ]
    return "\n".join(
        [
            *lines,
            "",
            *_table_notes(results),
            f"build: {rows[0]['build_commit']} ({rows[0]['build_number']})",
        ]
    )


def _cell(name: str, value: Any) -> str:
    if name == "flash_attn":
        return FLASH_NAMES[value]
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _table_notes(results: Sequence[SpeedResult]) -> list[str]:
    """Return the lines below the table: the cost of sampling, the share of the memory bandwidth
    that each test used, and a comparison with human reading speeds.
    """
    lines = []
    for result in results:
        if result.sampling_cost:
            lines.append(
                f"{result.test.title}: sampling and detokenizing add {_format_sampling_cost(result.sampling_cost)}"
            )
    shares = [
        f"{result.bandwidth_share:.0%} ({result.title})"
        for result in results
        if result.bandwidth_share is not None and not result.sampling_cost
    ]
    if shares and results[0].bandwidth:
        lines.append(
            f"memory gives {results[0].bandwidth / 1e9:.1f} GB/s; share used: {', '.join(shares)}"
        )
        if any(result.bandwidth_share and result.bandwidth_share > 1 for result in results):
            lines.append(
                "above 100%: the last-level cache helps, or other programs used memory while it was"
                " measured (--remeasure)"
            )
    reading_pace = results[0].subject.reading_pace
    rates = [result.each_ts for result in results if _only_generates(result.test)]
    return [*lines, reading_pace.format_line(rates)] if reading_pace and rates else lines


def _format_sampling_cost(extra: SamplingCost) -> str:
    if extra.low is None or extra.high is None:
        span = " (too few repetitions for an interval)"
    else:
        hidden = ", within the noise" if extra.low <= 0 <= extra.high else ""
        span = f" ({extra.low:.3f} to {extra.high:.3f}{hidden})"
    return f"{extra.ms:.3f} ms a step{span}, {extra.share:.1%} of decoding alone"


def noise_warning(results: Sequence[SpeedResult]) -> str | None:
    """Return a warning if the repetitions of a test differ too much; None if they do not."""
    worst = max(results, key=lambda result: result.spread)
    if worst.spread < NOISY_SPREAD or len(worst.samples_ns) < 3:
        return None
    return (
        f"the repetitions of {worst.title} differ by {worst.spread:.0%}: other programs use this"
        " machine; compare by the deviations, or measure again when it is quiet"
    )


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 10**9 else f"{number / 1e6:.2f} M"
