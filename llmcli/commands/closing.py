"""What is said of a plan before it is carried out, and of a model file once it is there. It knows
words, no flags.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.ui import UI, size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmcli.commands.certifying import Certified
    from quant.quantize import Plan, Report

ENOUGH = 16  # rows for each column of an input: with fewer, more of them still pay


def tell(plan: "Plan", ui: UI) -> None:
    """Say before the work begins what the user should know of it."""
    for note in plan.notes:
        ui.note(note)
    for warning in plan.source.warnings:
        ui.warn(warning)
    if plan.requantized:
        ui.warn(
            f"the source is quantized already ({', '.join(plan.requantized)}): rounding it again adds its error "
            "(the table's error column) to the error it has; a float checkpoint gives a better file"
        )
    _of_another(plan, ui)
    if plan.unweighed:
        some = ", ".join(plan.unweighed[:3]) + (" …" if len(plan.unweighed) > 3 else "")
        ui.note(
            f"the imatrix does not speak of {len(plan.unweighed)} tensors, rounded without it: {some}"
        )
    if plan.fallbacks:
        changes = ", ".join(sorted({f"{step.wanted} -> {step.type}" for step in plan.fallbacks}))
        ui.note(
            f"{len(plan.fallbacks)} of {len(plan.steps)} tensors do not fill whole blocks with a row: {changes}"
        )
    _thin(plan, ui)
    for name, steps in plan.methods.items():
        if name != plan.method.name:
            types = ", ".join(sorted({step.type for step in steps}))
            ui.note(
                f"{len(steps)} tensors go through {name}'s search, {plan.method.name} does not do them: {types}"
            )


def _of_another(plan: "Plan", ui: UI) -> None:
    """Say where what steers the rounding was gathered from another file."""
    known = [plan.imatrix, plan.moments.imatrix if plan.moments else None]
    for path, model in {one.path: one.model for one in known if one}.items():
        if model not in ("", plan.source.fingerprint):
            ui.note(
                f"{path} was gathered from another file than {plan.source.name}: of use where that is the same model "
                "in another type, or a near kin of it; any other's steers wrongly"
            )


def _thin(plan: "Plan", ui: UI) -> None:
    """Say where second moments are too few to be inverted by themselves: the method damps them,
    with less to gain; and where more of them would pay. Gemma 3 270M at Q4_K_M, three texts: 28 %
    below llama-imatrix's file with 12,288 tokens, 6 for each column of the widest input, and 38 %
    with 49,152 (docs/quality.md).
    """
    if plan.moments is None or plan.method.needs != "moments":
        return
    known = [
        second
        for step in plan.steps
        if step.method and (second := plan.moments.of(step.weight.name))
    ]
    if thin := [second for second in known if second.thin]:
        ui.note(
            f"the moments of {len(thin)} tensors are of fewer rows than they have columns: damped, they steer less "
            "than a longer text's would"
        )
    elif few := [second for second in known if 0 < second.fewest < ENOUGH * second.columns]:
        ui.note(
            f"the moments of {len(few)} tensors are of fewer than {ENOUGH} rows for each column: a longer text would "
            "make a nearer file"
        )
    if unseen := sum(second.unseen for second in known):
        ui.note(
            f"no token went to {unseen} matrices of experts: they are rounded as if all columns mattered alike"
        )


def close(
    plan: "Plan",
    out: Path,
    report: "Report | None",
    ui: UI,
    found: "Certified | None" = None,
    told: "Mapping[str, Any] | None" = None,
) -> None:
    """The closing table, or the document of --json; `found` is what --verify made, `told` what else
    there is to say.
    """
    from llmcli.commands import certified
    from quant.quantize import tally

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
        certified.tell(found.certificate, found.files, ui)


def _remarked(plan: "Plan", report: "Report", ui: UI) -> None:
    """What the method found out while it worked."""
    remarks = report.remarks.values()
    if others := sum(one.others for one in remarks):
        rows, tensors = sum(one.rows for one in remarks), sum(one.others > 0 for one in remarks)
        ui.note(
            f"{others:,} of {rows:,} rows, in {tensors} of {len(remarks)} tensors, have the codes of "
            f"{plan.method.instead}: {plan.method.name}'s had no less error by the second moments"
        )
    if damped := [one.damping for one in remarks if one.damping]:
        ui.note(
            f"the second moments of {len(damped)} tensors had no inverse and were damped by up to {max(damped):g} of "
            "their mean diagonal; a longer calibration text would do"
        )


def _certificate(found: "Certified | None") -> dict[str, Any]:
    from llmcli.commands import certified

    if found is None:
        return {}
    told = certified.document(found.certificate, (), True)
    return {"certificate": {**told, "files": [str(file) for file in found.files]}}


def _nbytes(plan: "Plan", out: Path, report: "Report | None") -> int:
    """What the files have: a certificate is not planned."""
    return sum(file.stat().st_size for file in plan.files(out)) if report else plan.nbytes


def _document(plan: "Plan", out: Path, report: "Report | None") -> dict[str, Any]:
    from quant.quantize import tally

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
    """The finished file's digest: taken while it was written, else read now."""
    from llmcli.catalog.store import measure

    return report.sha256 or measure(report.out).sha256
