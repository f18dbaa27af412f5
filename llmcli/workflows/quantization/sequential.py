"""`quantize --sequential`: quantizes a model block by block. The second moments for a block are
collected with the earlier blocks already quantized, so that they include the errors of those
blocks.

The text is read by a scratch model, which has one shard per block in a folder next to the new file.
An interrupted run resumes at the current pass or tensor.
"""

import hashlib
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.atomic_files import make_folder
from llmcli.catalog import scratch_folders
from llmcli.hardware import host
from llmcli.model_loader import float_copy, quantize_file
from llmcli.units import format_size
from llmcli.workflows.calibration import calibrate, ensure_statistics
from quant.calibration import moments
from quant.model_file import read_header
from quant.native import blas_threads
from quant.quantize import write
from quant.quantize.blockwise import BlockwiseModel, TensorGroup, unquantized_plan

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.types import ProgressBar
    from llmcli.ui import UI
    from llmcli.workflows.evaluation.models import EvaluationSide
    from quant.calibration.statistics import SecondMoments
    from quant.calibration.text_record import TextRecord
    from quant.evaluation.evaluate import TextChunks
    from quant.quantize.plan import Plan
    from quant.quantize.write import WriteReport

# disk space relative to the weights of the scratch model: headers and one block's moments are extra
SCRATCH_SPACE_FACTOR = 1.1


def write_blockwise(
    request: ensure_statistics.StatisticsRequest,
    config: "Config",
    plan: "Plan",
    out: Path,
    ui: "UI",
    *,
    threads: int = 0,
    force: bool = False,
) -> "WriteReport":
    """Quantize a plan block by block, and write the file. Return the report. If the file is already
    finished, only report this.

    `request`: the request for statistics, which names the text to read. `force`: write the file
    again. Raises UserError.
    """
    write.require_writable_files(plan, out, force=force)
    if not force and write.is_finished(plan, out):
        return quantize_file.write_with_progress(plan, out, ui, threads=threads)
    started_at = time.monotonic()
    with (
        scratch_folders.claim_work_folder(out, config, ui) as folder,
        blas_threads.limit_threads(threads or None),
    ):
        if force:
            shutil.rmtree(folder, ignore_errors=True)
        run = _BlockwiseRun(
            replace(request, needs_moments=True, threads=threads), config, plan, folder, ui
        )
        run.run()
        with ui.bar(f"join {out.name}", len(plan.steps), "tensors") as bar:
            report = write.write_model(
                run.prefix.merged_plan(),
                out,
                threads=threads,
                force=True,
                on_tensor=lambda progress: bar.advance(1),
            )
        shutil.rmtree(folder)
    work = run.work
    return replace(
        report,
        plan=plan,
        seconds=time.monotonic() - started_at,
        resumed=work.resumed,
        type_summaries=work.summarize(),
        resumed_bytes=work.resumed_bytes,
        method_reports=work.method_reports,
    )


class _BlockwiseRun:
    """One blockwise quantization in progress. `prefix`: the scratch model, whose first blocks are
    already quantized.
    """

    def __init__(
        self,
        request: ensure_statistics.StatisticsRequest,
        config: "Config",
        plan: "Plan",
        folder: Path,
        ui: "UI",
    ) -> None:
        self.request, self.config, self.ui = request, config, ui
        self.prefix = BlockwiseModel(plan, unquantized_plan(plan), folder)
        self.key = hashlib.sha256(
            f"{plan.source.fingerprint} {plan.settings}".encode()
        ).hexdigest()[:16]
        self.threads = request.threads or host.core_count()
        self.work = write.WriteRun(plan, self.threads)
        self.n_other_methods = self.peak_bytes = 0

    def run(self) -> None:
        """Quantize all groups of tensors in the order of computation."""
        ensure_statistics.require_long_text(self.request, self.ui)
        self._write_scratch_model()
        model_side, text, record = ensure_statistics.prepare_text(
            self.prefix.model_path, self.request, self.ui
        )
        remaining = []
        for group in self.prefix.ordered_groups:
            if self.prefix.is_finished(group):
                self.work.skip_file(group.plan)
            else:
                remaining.append(group)
        if self.work.resumed:
            self.ui.note(f"resuming an earlier run: {len(remaining)} groups of tensors are left")
        passes = sum(bool(group.moment_weights) for group in remaining)
        self._print_forecast(text, record, passes)
        group_seconds: list[float] = []  # duration of each group that needs a pass over the text
        with self.ui.bar(
            f"quantize {self.prefix.plan.source.name}", passes * text.count, "chunks"
        ) as bar:
            for group in remaining:
                started_at = time.monotonic()
                bar.describe(f"read {text.count} chunks up to {group.name}")
                second_moments = (
                    self._collect_moments(group, model_side, text, record, bar)
                    if group.moment_weights
                    else {}
                )
                bar.describe(f"quantize {group.name}")
                steps = self.prefix.quantize_group(group, second_moments, self.work)
                pairs = zip(steps, group.plan.steps, strict=True)
                self.n_other_methods += sum(
                    step.method != planned_step.method for step, planned_step in pairs
                )
                self._scratch_file(group, "moments").unlink(missing_ok=True)
                self._scratch_file(group, "sums").unlink(missing_ok=True)
                if group.moment_weights:
                    group_seconds.append(time.monotonic() - started_at)
                    if len(group_seconds) == 2 < passes:
                        self._print_remaining_time(group_seconds, passes)
        if self.n_other_methods:
            self.ui.note(
                f"{self.n_other_methods} tensors were quantized by another method than planned, because no "
                "moments were collected for them"
            )

    def _write_scratch_model(self) -> None:
        """Write the shards of the scratch model that do not exist yet. Raises UserError if there is
        too little disk space.
        """
        prefix = self.prefix
        needed_bytes = sum(group.unquantized_plan.layout.nbytes for group in prefix.groups)
        exists = prefix.folder.is_dir()
        existing_bytes = (
            sum(file.stat().st_size for file in prefix.folder.iterdir()) if exists else 0
        )
        float_copy.require_disk_space(
            {
                prefix.folder.absolute(): max(
                    0, int(SCRATCH_SPACE_FACTOR * needed_bytes) - existing_bytes
                )
                + prefix.plan.nbytes
            }
        )
        make_folder(prefix.folder)
        with self.ui.bar(
            f"write a scratch model: {format_size(needed_bytes)}", len(prefix.plan.steps), "tensors"
        ) as bar:
            for group in prefix.write_missing(self.threads):
                bar.advance(len(group.plan.steps))

    def _collect_moments(
        self,
        group: TensorGroup,
        model_side: "EvaluationSide",
        text: "TextChunks",
        record: "TextRecord",
        bar: "ProgressBar",
    ) -> "dict[str, SecondMoments]":
        """Return the second moments for the tensors of a group. They are collected by running the
        text through the partly quantized model.
        """
        file = self._scratch_file(group, "moments")
        if not file.exists():
            model, source = (
                replace(model_side, header=read_header.read_header(self.prefix.model_path)),
                self.prefix.plan.source,
            )
            request = calibrate.CalibrationRequest(
                model,
                source.fingerprint,
                text,
                record,
                self._scratch_file(group, "sums"),
                file,
                weights=group.moment_weights,
            )
            self.peak_bytes = max(
                self.peak_bytes,
                calibrate.run_calibration(request, self.config, self.ui, bar).peak_bytes,
            )
        if not file.exists():
            return {}
        shapes = [(step.weight.name, step.weight.shape) for step in group.plan.steps]
        return dict(moments.load_moments(file).match_tensors(shapes))

    def _scratch_file(self, group: TensorGroup, kind: str) -> Path:
        return self.prefix.folder / f"{self.key}-{group.number}.{kind}.gguf"

    def _print_forecast(self, text: "TextChunks", record: "TextRecord", passes: int) -> None:
        """Print how many times the text will be read."""
        self.ui.note(
            f"--sequential: {text.ids.size:,} tokens of {record.names[0]} are read {passes} times, "
            "each time up to the next group of tensors; the same command resumes an interrupted run, "
            "`llmcli gc` deletes it"
        )

    def _print_remaining_time(self, group_seconds: list[float], passes: int) -> None:
        """Print the remaining time, extrapolated from the first two groups. Later groups take
        longer, because the text passes through more blocks.
        """
        first, second = group_seconds
        n_remaining = passes - 2
        seconds = (
            n_remaining * second + max(0.0, second - first) * n_remaining * (n_remaining + 1) / 2
        )
        duration = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"
        self.ui.note(
            f"the first two groups took {first + second:.0f} s, {format_size(self.peak_bytes)} for second "
            f"moments and {format_size(host.resident_memory() or 0)} of memory in total; "
            f"about {duration} remain"
        )
