"""Prints the notes about a plan before it is written, and the result of writing it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.ui import UI
from llmcli.units import size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmcli.workflows.certification.certify import Certified
    from quant.quantize.plan import Plan
    from quant.quantize.write import Report


def close(
    plan: "Plan",
    out: Path,
    report: "Report | None",
    ui: UI,
    found: "Certified | None" = None,
    told: "Mapping[str, Any] | None" = None,
) -> None:
    """Print the closing table, or the JSON document under --json.

    `report`: None for a dry run; `certified_file`: the certificate that --verify wrote;
    `extra_fields`: additional JSON fields.
    """
    from llmcli.workflows.certification import certificate_text
    from quant.quantize.write import tally

    lines = report.tallies if report else tally(plan)
    if ui.json:
        ui.result({**_document(plan, out, report), **(told or {}), **_certificate(found)})
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
        _remarked(plan, report, ui)
        ui.text(f"{named} ({size(_nbytes(plan, out, report))}, {report.seconds:.1f} s)")
    if found:
        certificate_text.tell(found.certificate, found.files, ui)


def _remarked(plan: "Plan", report: "Report", ui: UI) -> None:
    """Print what the method reported while it worked."""
    remarks = report.remarks.values()
    if others := sum(one.others for one in remarks):
        rows, tensors = sum(one.rows for one in remarks), sum(one.others > 0 for one in remarks)
        ui.note(
            f"{others:,} of {rows:,} rows, in {tensors} of {len(remarks)} tensors, have the codes "
            f"of {plan.method.instead}: those of {plan.method.name} had no smaller error by the "
            "second moments"
        )
    if damped := [one.damping for one in remarks if one.damping]:
        ui.note(
            f"the second moments of {len(damped)} tensors were singular and were damped by up to "
            f"{max(damped):g} of their mean diagonal; a longer calibration text would avoid this"
        )


def _certificate(found: "Certified | None") -> dict[str, Any]:
    from llmcli.workflows.certification import certificate_text

    if found is None:
        return {}
    told = certificate_text.document(found.certificate, (), True)
    return {"certificate": {**told, "files": [str(file) for file in found.files]}}


def _nbytes(plan: "Plan", out: Path, report: "Report | None") -> int:
    """Return the bytes of the files; a written file also contains the certificate, which is not
    planned.
    """
    return sum(file.stat().st_size for file in plan.files(out)) if report else plan.nbytes


def _document(plan: "Plan", out: Path, report: "Report | None") -> dict[str, Any]:
    from quant.quantize.write import tally

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
        "requantized_from": list(plan.requantized),
        "imatrix": str(plan.imatrix.path) if plan.imatrix else None,
        "without_importance": len(plan.unweighed),
        "method": plan.method.name,
        "sequential": plan.pending.digest or None if plan.pending else None,
        "methods": {name: len(steps) for name, steps in plan.methods.items()},
        "rows_left": sum(one.others for one in report.remarks.values()) if report else 0,
        "damped": {name: one.damping for name, one in report.remarks.items() if one.damping}
        if report
        else {},
        "fold": {"kinds": plan.source.folded.split(","), "digest": plan.source.fold}
        if plan.source.fold
        else None,
        "types": {
            line.type: {
                "tensors": line.tensors,
                "bytes": line.bytes_after,
                "source_bytes": line.bytes_before,
                "relative_rmse": line.error,
                "elapsed_ms": None if line.seconds is None else line.seconds * 1000,
            }
            for line in (report.tallies if report else tally(plan))
        },
        "dry_run": report is None,
        "present": bool(report and report.present),
        "resumed_tensors": report.resumed if report else 0,
        "resumed_bytes": report.resumed_bytes if report else 0,
        "sha256": _sha256(report) if report and not plan.most else None,
        "elapsed_ms": report.seconds * 1000 if report else 0.0,
    }


def _sha256(report: "Report") -> str:
    """Return the file's sha256, which was computed while it was written or is computed now."""
    from llmcli.catalog.store import measure

    return report.sha256 or measure(report.out).sha256
