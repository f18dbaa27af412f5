"""Quantization of a source into GGUF files: a plan is written in one pass, tensor by tensor.

With `--method ggml` the bytes of every tensor are those that llama.cpp writes
(`llama_model_quantize` of the same library).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path

from quant.disk_space import require_disk_space, reusable_bytes
from quant.errors import DamagedSourceError, UserError
from quant.gguf.header import read_file_header
from quant.gguf.resumable_writer import ResumableWriter
from quant.methods.base import MethodReport
from quant.model_file import load_checks, read_header
from quant.native import ggml
from quant.native.processors import worker_count
from quant.quantize.output_files import require_writable_file
from quant.quantize.pipeline import EncodedRows, encode_rows
from quant.quantize.plan import (
    DROPPED_KEYS,
    SETTINGS_KEY,
    SOURCE_KEY,
    Plan,
    TensorPlan,
    read_transform,
)
from quant.recipes import tensor_types
from quant.recipes.file_types import ModelFacts
from quant.source.source import Source, Weight, make_file_row_reader


@dataclass(frozen=True, slots=True)
class WriteProgress:
    """A report that a tensor is finished: number `index` (from 1) of `count`. `resumed` means that
    an earlier run wrote it.
    """

    index: int
    count: int
    step: TensorPlan
    resumed: bool


@dataclass(frozen=True, slots=True)
class TypeSummary:
    """A row of the table at the end of a run: all tensors of one new type.

    `error` is the relative RMS error of their new codes against the source. `error` and `seconds`
    refer to the tensors that this run encoded; they are None if it encoded none. `seconds` is the
    sum of the threads' times divided by the number of threads, which is this type's share of the
    total time if no thread waited.
    """

    type: str
    tensors: int
    bytes_before: int
    bytes_after: int
    elements: int
    error: float | None
    seconds: float | None

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per value of the tensors of this type."""
        return self.bytes_after * 8 / self.elements


@dataclass(frozen=True, slots=True)
class WriteReport:
    """The result of a run. `already_finished` means that the finished file existed and nothing was
    written.

    `resumed` is the number of complete tensors, and `resumed_bytes` the number of bytes, that an
    earlier run had written. `sha256` is the digest of the file; it is None for shards and for a
    file that existed already. `method_reports` are by tensor name.
    """

    plan: Plan
    out: Path
    seconds: float
    resumed: int
    already_finished: bool
    type_summaries: tuple[TypeSummary, ...]
    resumed_bytes: int = 0
    sha256: str | None = None
    method_reports: Mapping[str, MethodReport] = field(default_factory=dict)


def open_gguf(path: Path) -> Source:
    """Open a GGUF file, or the first shard of a split one, as a source. Weights are read when they
    are needed. Raises UserError if the file has no tensors or contains no model.
    """
    header = read_header.read_header(path)
    if not header.tensors:
        raise UserError(
            f"{path} contains a vocabulary but no tensors", hint="name a file with weights"
        )
    load_checks.require_model(header)
    heads = header.get_int("attention.head_count") or 0
    kv_heads = header.get_int("attention.head_count_kv")
    layers = header.get_int("block_count")
    facts = ModelFacts(
        architecture=header.architecture,
        layers=max(tensor_types.tensor_order(t.name)[0] for t in header.tensors) + 1
        if layers is None
        else layers,
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        experts=header.get_int("expert_count") or 0,
        prediction_layers=header.get_int("nextn_predict_layers") or 0,
    )
    weights = tuple(
        Weight(
            t.name,
            t.shape,
            t.type,
            make_file_row_reader(t.file, t.offset, ggml.row_bytes(t.type, t.columns), t.name),
        )
        for t in header.tensors
    )
    entries = tuple(
        (field.key, field.read_raw()) for field in header.fields if field.key not in DROPPED_KEYS
    )
    match = read_header.SHARD_NAME.match(path.name)
    name = match["stem"] if match else path.name.removesuffix(".gguf")
    transform = read_transform(header.metadata.get(SETTINGS_KEY))
    return Source(
        path,
        header.files,
        name,
        facts,
        entries,
        weights,
        header.alignment,
        transform_digest=transform,
    )


def write_model(
    plan: Plan,
    out: Path,
    *,
    threads: int = 0,
    force: bool = False,
    on_tensor: Callable[[WriteProgress], None] = lambda progress: None,
) -> WriteReport:
    """Write `out`, or its shards, each completely or not at all. An interrupted run of the same
    plan is resumed.

    `threads` 0 uses all cores. A finished `out` of this plan is not written again unless `force` is
    set. A file that this program did not make is replaced only with `force`, and any file only by a
    complete new one. `on_tensor` is called for each finished tensor. Raises UserError if the files
    cannot be written.
    """
    started, files = time.monotonic(), plan.files(out)
    require_writable_files(plan, out, force=force)
    if not force and is_finished(plan, out):
        return WriteReport(
            plan, files[0], time.monotonic() - started, 0, True, summarize_types(plan)
        )
    work = WriteRun(plan, threads or worker_count(), on_tensor)
    unfinished = [
        force or not _is_finished(file_plan, file)
        for file_plan, file in zip(plan.file_plans, files, strict=True)
    ]
    if plan.max_shard_bytes:
        _require_disk_space(
            [
                file_plan.layout.nbytes
                for file_plan, is_unfinished in zip(plan.file_plans, unfinished, strict=True)
                if is_unfinished
            ],
            files,
        )
    for number, (file_plan, is_unfinished) in enumerate(
        zip(plan.file_plans, unfinished, strict=True)
    ):
        try:
            if is_unfinished:
                work.write_file(file_plan, files[number])
            else:
                work.skip_file(file_plan)
        except DamagedSourceError:
            for shard in files[:number]:  # they were made from the same source
                shard.unlink(missing_ok=True)
            raise
    sha256 = None if plan.max_shard_bytes else work.sha256
    seconds = time.monotonic() - started
    return WriteReport(
        plan,
        files[0],
        seconds,
        work.resumed,
        False,
        work.summarize(),
        work.resumed_bytes,
        sha256,
        work.method_reports,
    )


class WriteRun:
    """A run in progress. It adds up totals over the files that it writes, and counts what earlier
    runs had written.
    """

    def __init__(
        self,
        plan: Plan,
        threads: int,
        on_tensor: Callable[[WriteProgress], None] = lambda progress: None,
    ) -> None:
        self.plan, self.threads, self.on_tensor = plan, threads, on_tensor
        self.type_totals: dict[str, _TypeTotals] = {}
        self.method_reports: dict[str, MethodReport] = {}
        self.announced = self.resumed = self.resumed_bytes = 0
        self.sha256 = ""

    def write_file(self, file_plan: Plan, out: Path) -> None:
        """Write the file of one plan to `out`, continuing where an earlier run stopped."""
        newest_mtime = str(file_plan.source.newest_mtime_ns)
        identity = {
            "source": file_plan.source.fingerprint,
            "changed": newest_mtime,
            "settings": file_plan.settings,
        }
        if backends := sorted(
            {step.method.backend_name() for step in file_plan.steps if step.method} - {""}
        ):
            identity["means"] = ", ".join(backends)
        writer = ResumableWriter(out, file_plan.layout, identity)
        with writer.open():
            tensor_count, row = file_plan.written_extent(writer.position)
            self.resumed_bytes += writer.resumed_bytes
            self._count_resumed(file_plan.steps[:tensor_count])
            with closing(
                encode_rows(file_plan.steps, self.threads, (tensor_count, row))
            ) as all_rows:
                for rows in all_rows:
                    _append_rows(writer, file_plan, rows)
                    self.type_totals.setdefault(
                        file_plan.steps[rows.index].type, _TypeTotals()
                    ).add(rows)
                    if rows.last == (step := file_plan.steps[rows.index]).weight.rows:
                        self._record_report(step, rows)
                        self._announce(step, False)
            if file_plan.steps[-1] is self.plan.steps[-1]:
                for blob in file_plan.source.blobs:
                    blob.finish_check(was_resumed=bool(self.resumed_bytes))
            self.sha256 = writer.finish()

    def skip_file(self, file_plan: Plan) -> None:
        """Count the tensors and bytes of a file that an earlier run had finished."""
        self.resumed_bytes += file_plan.layout.nbytes
        self._count_resumed(file_plan.steps)

    def summarize(self) -> tuple[TypeSummary, ...]:
        """Return the rows of the table at the end of the run."""
        return summarize_types(self.plan, self.type_totals, self.threads)

    def _record_report(self, step: TensorPlan, rows: EncodedRows) -> None:
        """Record the method's report after the last rows of a tensor. Rows arrive in order, so that
        all rows are encoded by then.
        """
        if step.method and rows.encoder and (report := step.method.report(rows.encoder)):
            self.method_reports[step.weight.name] = report

    def _count_resumed(self, steps: Sequence[TensorPlan]) -> None:
        """Count tensors that an earlier run had written, and report them."""
        self.resumed += len(steps)
        for step in steps:
            self._announce(step, True)

    def _announce(self, step: TensorPlan, resumed: bool) -> None:
        """Report a finished tensor to the caller."""
        self.announced += 1
        self.on_tensor(WriteProgress(self.announced, len(self.plan.steps), step, resumed))


def _require_disk_space(sizes: Sequence[int], files: Sequence[Path]) -> None:
    """Raise UserError, before the first shard is written, if the disk has too little space for
    shards of these sizes in bytes. The bytes of unfinished files count as free.
    """
    parts = [file.with_name(f".{file.name}.part") for file in files]
    require_disk_space(
        files[0].parent,
        sum(sizes) - reusable_bytes(parts),
        f"the {len(files)} shards need",
        "or choose a folder on another disk with -o",
    )


def _append_rows(writer: ResumableWriter, plan: Plan, rows: EncodedRows) -> None:
    """Append rows to the file. The end of a slab is recorded in the journal, so that a killed run
    loses at most one slab.
    """
    if not rows.first:
        writer.pad(plan.layout.slots[rows.index].offset)
    writer.append(rows.data.data)
    writer.checkpoint(now=rows.ends_slab)


def is_finished(plan: Plan, out: Path) -> bool:
    """Return whether all files of the plan are complete and were made from this source with these
    settings.
    """
    return all(
        _is_finished(file_plan, file)
        for file_plan, file in zip(plan.file_plans, plan.files(out), strict=True)
    )


def _is_finished(plan: Plan, out: Path) -> bool:
    """Return whether one file of a plan is complete, see is_finished()."""
    if not out.is_file():
        return False
    try:
        header = read_file_header(out)
    except UserError:
        return False  # some other file, which will be replaced by a complete one
    metadata = {field.key: field.value for field in header.fields}
    table = [(t.name, t.shape, t.type) for t in header.tensors]
    # The fingerprint covers samples of the source and may miss a small edit, which the modification
    # time shows.
    return (
        plan.source.newest_mtime_ns <= out.stat().st_mtime_ns
        and metadata.get(SOURCE_KEY) == plan.source.fingerprint
        and metadata.get(SETTINGS_KEY) == plan.settings
        and table == [(s.weight.name, s.weight.shape, s.type) for s in plan.steps]
    )


def require_writable_files(plan: Plan, out: Path, *, force: bool = False) -> None:
    """Raise UserError if the plan's files cannot be written. `force`: replace any file."""
    for file in plan.files(out):
        require_writable_file(plan.source.files, file, force=force)


class _TypeTotals:
    """Totals over the tensors of one type: the sums of squares of sampled values (`signal`) and of
    their rounding errors (`noise`), and the threads' time.
    """

    def __init__(self) -> None:
        self.signal = self.noise = self.seconds = 0.0

    def add(self, rows: EncodedRows) -> None:
        self.signal += rows.signal
        self.noise += rows.noise
        self.seconds += rows.seconds

    @property
    def relative_error(self) -> float | None:
        """The relative RMS error; None if no rows were sampled."""
        return sqrt(self.noise / self.signal) if self.signal else None


def summarize_types(
    plan: Plan, sums: Mapping[str, _TypeTotals] | None = None, threads: int = 1
) -> tuple[TypeSummary, ...]:
    """Return one row for each type, the type with the most bytes first. `sums` are the totals by
    type. Without `sums`, rows have no errors or times.
    """
    rows: dict[str, TypeSummary] = {}
    for step in plan.steps:
        old = rows.get(step.type, TypeSummary(step.type, 0, 0, 0, 0, None, None))
        totals = sums.get(step.type) if sums else None
        error, seconds = (
            (totals.relative_error, totals.seconds / threads) if totals else (None, None)
        )
        before, after = old.bytes_before + step.weight.nbytes, old.bytes_after + step.nbytes
        elements = old.elements + step.weight.elements
        rows[step.type] = TypeSummary(
            step.type, old.tensors + 1, before, after, elements, error, seconds
        )
    return tuple(sorted(rows.values(), key=lambda row: -row.bytes_after))
