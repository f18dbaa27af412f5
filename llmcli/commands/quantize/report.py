"""The text and JSON output of quantize and convert."""

import shlex
from typing import TYPE_CHECKING, Any

from llmcli.ui import UI
from llmcli.units import format_count, format_size

if TYPE_CHECKING:
    from pathlib import Path

    from llmcli.model_loader.llama_converter.side_files import SideFile
    from llmcli.workflows.quantization.convert_adapter import AdapterResult
    from llmcli.workflows.quantization.convert_heads import HeadsResult
    from llmcli.workflows.quantization.quantize import QuantizeResult


def print_result(result: "QuantizeResult", ui: UI) -> None:
    """Print the result as a table, or as a JSON document with --json."""
    from llmcli.workflows.certification import certificate_text

    if ui.json:
        ui.result(build_document(result))
        return
    _print_table(result, ui)
    files = result.files
    names = str(files[0]) + (f" and {len(files) - 1} more" if len(files) > 1 else "")
    if result.report is None:
        ui.text(f"would write {names} ({format_size(result.nbytes)}); nothing was written")
    else:
        _print_remarks(result, ui)
        ui.text(f"{names} ({format_size(result.nbytes)}, {result.seconds:.1f} s)")
    if result.mmproj:
        print_mmproj(result.mmproj, files[0], ui)
    if result.certified_file:
        certificate = result.certified_file
        certificate_text.print_summary(certificate.certificate, certificate.sidecars, ui)


def print_mmproj(file: "SideFile", model: "Path", ui: UI) -> None:
    """Print the path of a model's vision or audio part, and how to run it."""
    verb = "would write " if file.is_planned else ""
    ui.text(f"{verb}{file.path} ({format_size(file.nbytes)}): the vision or audio part")
    ui.note(
        "llmcli does not run mmproj files yet; llama.cpp's llama-mtmd-cli does: "
        + shlex.join(["llama-mtmd-cli", "-m", str(model), "--mmproj", str(file.path)])
    )


def print_adapter(result: "AdapterResult", ui: UI) -> None:
    """Print the path of a GGUF adapter and how to run it, or a JSON document with --json."""
    file, header = result.file, result.header
    if ui.json:
        ui.result(
            {
                "path": str(file.path),
                "bytes": file.nbytes,
                "architecture": header.architecture,
                "base": str(result.base),
                "alpha": result.alpha,
                "tensors": len(header.tensors),
                "dry_run": file.is_planned,
                "present": file.is_present,
            }
        )
        return
    verb = "would write " if file.is_planned else ""
    ui.text(
        f"{verb}{file.path} ({format_size(file.nbytes)}): an adapter for {header.architecture}, "
        f"{len(header.tensors)} tensors, alpha {result.alpha:g}"
    )
    words = ["llama-cli", "-m", "MODEL.gguf", "--lora", str(file.path)]
    ui.note(f"llmcli does not run adapters yet; llama.cpp does: {shlex.join(words)}")


def print_heads(result: "HeadsResult", ui: UI) -> None:
    """Print the path of a file of draft heads and how to use it, or a JSON document with --json."""
    shapes = result.shapes
    if ui.json:
        ui.result(
            {
                "path": str(result.path),
                "bytes": result.nbytes,
                "method": shapes.method,
                "heads": shapes.n_heads,
                "layers": shapes.n_layers,
                "own_outputs": shapes.has_outputs,
                "base": result.base,
                "dry_run": result.is_planned,
                "present": result.is_present,
            }
        )
        return
    verb = "would write " if result.is_planned else ""
    ui.text(
        f"{verb}{result.path} ({format_size(result.nbytes)}): {shapes.n_heads} {shapes.method} heads"
    )
    words = ["llmcli", "run", result.base, "-md", str(result.path)]
    ui.note(f"to draft with them: {shlex.join(words)}")


def build_document(result: "QuantizeResult") -> dict[str, Any]:
    """Return the JSON document of a result."""
    plan, report = result.plan, result.report
    expected, source = plan.expected_moments, plan.source
    fold = {"kinds": source.fold_label.split(","), "digest": source.fold_digest}
    return {
        "path": str(result.files[0]),
        "files": [str(file) for file in result.files],
        "file_type": plan.file_type.name,
        "bytes": result.nbytes,
        "tensor_bytes": plan.bytes_after,
        "source_tensor_bytes": plan.bytes_before,
        "bits_per_weight": plan.bits_per_weight,
        "tensors": len(plan.steps),
        "fallbacks": len(plan.fallbacks),
        "requantized_from": list(plan.requantized_types),
        "imatrix": str(plan.imatrix.path) if plan.imatrix else None,
        "without_importance": len(plan.tensors_without_importance),
        "method": plan.method.name,
        "sequential": (expected.digest or None) if expected else None,
        "methods": {name: len(steps) for name, steps in plan.methods.items()},
        "rows_left": result.fallback_rows,
        "damped": result.damping,
        "fold": fold if source.fold_digest else None,
        "types": {
            row.type: {
                "tensors": row.tensors,
                "bytes": row.bytes_after,
                "source_bytes": row.bytes_before,
                "relative_rmse": row.error,
                "elapsed_ms": None if row.seconds is None else row.seconds * 1000,
            }
            for row in result.type_summaries
        },
        "converter": result.converter or None,
        "mmproj": result.mmproj
        and {
            "path": str(result.mmproj.path),
            "bytes": result.mmproj.nbytes,
            "present": result.mmproj.is_present,
        },
        "dry_run": report is None,
        "present": report is not None and report.already_finished,
        "resumed_tensors": report.resumed if report else 0,
        "resumed_bytes": report.resumed_bytes if report else 0,
        "sha256": result.read_sha256(),
        "elapsed_ms": result.seconds * 1000,
        "forecast": result.forecast
        and {
            "elapsed_ms": result.forecast.seconds * 1000,
            "factor_ms": result.forecast.factor_seconds * 1000,
            "memory_bytes": result.forecast.memory_bytes,
        },
        **result.mix_fields,
        **_certificate_field(result),
    }


def _certificate_field(result: "QuantizeResult") -> dict[str, Any]:
    from llmcli.workflows.certification import certificate_text

    if result.certified_file is None:
        return {}
    document = certificate_text.build_document(result.certified_file.certificate, (), True)
    sidecars = [str(file) for file in result.certified_file.sidecars]
    return {"certificate": {**document, "files": sidecars}}


def _print_table(result: "QuantizeResult", ui: UI) -> None:
    plan = result.plan
    columns = ("type", "tensors", "before", "after", "bits/weight", "weight RMSE", "seconds")
    rows = [
        (
            row.type,
            str(row.tensors),
            format_size(row.bytes_before),
            format_size(row.bytes_after),
            f"{row.bits_per_weight:.2f}",
            "" if row.error is None else f"{row.error:.2%}",
            "" if row.seconds is None else f"{row.seconds:.2f}",
        )
        for row in result.type_summaries
    ]
    total = (
        "total",
        str(len(plan.steps)),
        format_size(plan.bytes_before),
        format_size(plan.bytes_after),
        f"{plan.bits_per_weight:.2f}",
        "",
        f"{result.seconds:.2f}" if result.report else "",
    )
    ui.table(columns, [*rows, total], right=columns[1:])


def _print_remarks(result: "QuantizeResult", ui: UI) -> None:
    """Print notes about rows that fell back to another method, and about damped second moments."""
    reports, method = result.method_reports.values(), result.plan.method
    if method.needs == "moments" and not result.certified_file:
        ui.note(
            f"the weight RMSE does not show what {method.name} gains: it accepts larger errors of "
            "single weights for smaller errors of the outputs; --verify measures these"
        )
    if result.fallback_rows:
        rows = sum(report.rows for report in reports)
        tensors = sum(report.fallback_rows > 0 for report in reports)
        ui.note(
            f"{result.fallback_rows:,} of {rows:,} rows, in {tensors} of {len(reports)} tensors, "
            f"have the codes of {method.fallback}: those of {method.name} had no smaller error by "
            "the second moments"
        )
    if damping := result.damping:
        ui.note(
            f"the second moments of {format_count(len(damping), 'tensor')} were singular and were "
            f"damped by up to {max(damping.values()):g} of their mean diagonal; a longer calibration text would "
            "avoid this"
        )
