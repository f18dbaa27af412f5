"""Prints the notes about a plan before it is written, and the result of writing it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.ui import UI
from llmcli.units import size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmcli.workflows.certification.certify import CertifiedFile
    from quant.quantize.plan import Plan
    from quant.quantize.write import WriteReport


def print_result(
    plan: "Plan",
    out: Path,
    report: "WriteReport | None",
    ui: UI,
    certified_file: "CertifiedFile | None" = None,
    extra_fields: "Mapping[str, Any] | None" = None,
) -> None:
    """Print the closing table, or the JSON document under --json.

    `report`: None for a dry run; `certified_file`: the certificate that --verify wrote;
    `extra_fields`: additional JSON fields.
    """
    from llmcli.workflows.certification import certificate_text
    from quant.quantize.write import summarize_types

    lines = report.type_summaries if report else summarize_types(plan)
    if ui.json:
        ui.result(
            {
                **_build_document(plan, out, report),
                **(extra_fields or {}),
                **_certificate(certified_file),
            }
        )
        return
    columns = ("type", "tensors", "before", "after", "bits/weight", "error", "seconds")
    rows = [
        (
            line.type,
            str(line.tensors),
            size(line.bytes_before),
            size(line.bytes_after),
            f"{line.bits_per_weight:.2f}",
            "" if line.error is None else f"{line.error:.2%}",
            "" if line.seconds is None else f"{line.seconds:.2f}",
        )
        for line in lines
    ]
    total = (
        "total",
        str(len(plan.steps)),
        size(plan.bytes_before),
        size(plan.bytes_after),
        f"{plan.bits_per_weight:.2f}",
        "",
        f"{report.seconds:.2f}" if report else "",
    )
    ui.table(columns, [*rows, total], right=columns[1:])
    files = plan.files(out)
    named = str(files[0]) + (f" and {len(files) - 1} more" if len(files) > 1 else "")
    if report is None:
        ui.text(f"would write {named} ({size(plan.nbytes)}); nothing was written")
    else:
        _print_remarks(plan, report, ui)
        ui.text(f"{named} ({size(_nbytes(plan, out, report))}, {report.seconds:.1f} s)")
    if certified_file:
        certificate_text.print_summary(certified_file.certificate, certified_file.sidecars, ui)


def _print_remarks(plan: "Plan", report: "WriteReport", ui: UI) -> None:
    """Print what the method reported while it worked."""
    remarks = report.method_reports.values()
    if others := sum(one.fallback_rows for one in remarks):
        rows, tensors = (
            sum(one.rows for one in remarks),
            sum(one.fallback_rows > 0 for one in remarks),
        )
        ui.note(
            f"{others:,} of {rows:,} rows, in {tensors} of {len(remarks)} tensors, have the codes "
            f"of {plan.method.fallback}: those of {plan.method.name} had no smaller error by the "
            "second moments"
        )
    if damped := [one.damping for one in remarks if one.damping]:
        ui.note(
            f"the second moments of {len(damped)} tensors were singular and were damped by up to "
            f"{max(damped):g} of their mean diagonal; a longer calibration text would avoid this"
        )


def _certificate(certified_file: "CertifiedFile | None") -> dict[str, Any]:
    from llmcli.workflows.certification import certificate_text

    if certified_file is None:
        return {}
    told = certificate_text.build_document(certified_file.certificate, (), True)
    return {"certificate": {**told, "files": [str(file) for file in certified_file.sidecars]}}


def _nbytes(plan: "Plan", out: Path, report: "WriteReport | None") -> int:
    """Return the bytes of the files; a written file also contains the certificate, which is not
    planned.
    """
    return sum(file.stat().st_size for file in plan.files(out)) if report else plan.nbytes


def _build_document(plan: "Plan", out: Path, report: "WriteReport | None") -> dict[str, Any]:
    from quant.quantize.write import summarize_types

    return {
        "path": str(plan.files(out)[0]),
        "files": [str(file) for file in plan.files(out)],
        "file_type": plan.file_type.name,
        "bytes": _nbytes(plan, out, report),
        "tensor_bytes": plan.bytes_after,
        "source_tensor_bytes": plan.bytes_before,
        "bits_per_weight": plan.bits_per_weight,
        "tensors": len(plan.steps),
        "fallbacks": len(plan.fallbacks),
        "requantized_from": list(plan.requantized_types),
        "imatrix": str(plan.imatrix.path) if plan.imatrix else None,
        "without_importance": len(plan.tensors_without_importance),
        "method": plan.method.name,
        "sequential": plan.expected_moments.digest or None if plan.expected_moments else None,
        "methods": {name: len(steps) for name, steps in plan.methods.items()},
        "rows_left": sum(one.fallback_rows for one in report.method_reports.values())
        if report
        else 0,
        "damped": {name: one.damping for name, one in report.method_reports.items() if one.damping}
        if report
        else {},
        "fold": {"kinds": plan.source.fold_label.split(","), "digest": plan.source.fold_digest}
        if plan.source.fold_digest
        else None,
        "types": {
            line.type: {
                "tensors": line.tensors,
                "bytes": line.bytes_after,
                "source_bytes": line.bytes_before,
                "relative_rmse": line.error,
                "elapsed_ms": None if line.seconds is None else line.seconds * 1000,
            }
            for line in (report.type_summaries if report else summarize_types(plan))
        },
        "dry_run": report is None,
        "present": bool(report and report.already_finished),
        "resumed_tensors": report.resumed if report else 0,
        "resumed_bytes": report.resumed_bytes if report else 0,
        "sha256": _sha256(report) if report and not plan.max_shard_bytes else None,
        "elapsed_ms": report.seconds * 1000 if report else 0.0,
    }


def _sha256(report: "WriteReport") -> str:
    """Return the file's sha256, which was computed while it was written or is computed now."""
    from llmcli.catalog.store import measure

    return report.sha256 or measure(report.out).sha256
