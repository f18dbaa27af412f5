"""Quantization of a source into GGUF files: a plan is written in one pass, tensor by tensor.

With `--method ggml` the bytes of every tensor equal llama.cpp's own (`llama_model_quantize` of the
same library).
"""

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path

from quant.errors import Refusal
from quant.gguf.header import parse
from quant.gguf.resumable_writer import Draft
from quant.methods.base import Remark
from quant.model_file import load_checks, read_header
from quant.native import ggml
from quant.quantize.pipeline import Piece, stream
from quant.quantize.plan import DROPPED, SETTINGS_KEY, SOURCE_KEY, Plan, Step, transform_of
from quant.recipes import tensor_types
from quant.recipes.file_types import Facts
from quant.source.source import Source, Weight, stored_rows


@dataclass(frozen=True, slots=True)
class Progress:
    """One finished tensor: number `index` (from 1) of `count`; `resumed` if an earlier run wrote
    it.
    """

    index: int
    count: int
    step: Step
    resumed: bool


@dataclass(frozen=True, slots=True)
class Tally:
    """A row of the closing table: one type with the relative RMS `error` of its new codes against
    the source.

    `error` and `seconds` cover what this run encoded; None if it encoded nothing. `seconds` is the
    threads' time divided by their number: this type's share of the total time if no thread waited.
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
        """Bits per value in this type."""
        return self.bytes_after * 8 / self.elements


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a run. `already_finished` means that the finished file existed and nothing was
    done.

    An earlier run had written `resumed` whole tensors, the first `resumed_bytes` of the file.
    `sha256` is None if the file existed, because it is not read then. `method_reports` are by
    tensor name.
    """

    plan: Plan
    out: Path
    seconds: float
    resumed: int
    present: bool
    tallies: tuple[Tally, ...]
    resumed_bytes: int = 0
    sha256: str | None = None
    remarks: Mapping[str, Remark] = field(default_factory=dict)


def open_gguf(path: Path) -> Source:
    """Open a GGUF file of any type as a source; weights are read when needed. Raises UserError if
    it has no tensors or llama.cpp could not load it.
    """
    header = read_header.read(path)
    if not header.tensors:
        raise Refusal(
            f"{path} contains a vocabulary but no tensors", hint="name a file with weights"
        )
    load_checks.check_model(header)
    heads = header.number("attention.head_count") or 0
    kv_heads = header.number("attention.head_count_kv")
    layers = header.number("block_count")
    facts = Facts(
        architecture=header.architecture,
        layers=max(tensor_types.order(t.name)[0] for t in header.tensors) + 1
        if layers is None
        else layers,
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        experts=header.number("expert_count") or 0,
    )
    weights = tuple(
        Weight(
            t.name,
            t.shape,
            t.type,
            stored_rows(t.file, t.offset, ggml.row_bytes(t.type, t.columns), t.name),
        )
        for t in header.tensors
    )
    entries = tuple(
        (field.key, field.copy()) for field in header.fields if field.key not in DROPPED
    )
    match = read_header.SHARD.match(path.name)
    name = match["stem"] if match else path.name.removesuffix(".gguf")
    transform = transform_of(header.metadata.get(SETTINGS_KEY))
    return Source(
        path, header.files, name, facts, entries, weights, header.alignment, transform=transform
    )


def run(
    plan: Plan,
    out: Path,
    *,
    threads: int = 0,
    force: bool = False,
    watch: Callable[[Progress], None] = lambda progress: None,
) -> Report:
    """Write `out`, or its shards, each completely or not at all. An interrupted run of the same
    plan is resumed.

    `threads` 0 uses all cores. A finished `out` of this plan is left alone unless `force` is set;
    any other file is replaced only by a complete new one. Raises UserError if it cannot be written.
    """
    started, files = time.monotonic(), plan.files(out)
    check(plan, out)
    if not force and finished(plan, out):
        return Report(plan, files[0], time.monotonic() - started, 0, True, tally(plan))
    work = Work(plan, threads or os.cpu_count() or 1, watch)
    open_parts = [
        force or not _is_finished(part, file) for part, file in zip(plan.parts, files, strict=True)
    ]
    if plan.most:
        _require_disk_space(
            [
                part.layout.nbytes
                for part, is_open in zip(plan.parts, open_parts, strict=True)
                if is_open
            ],
            files,
        )
    for part, file, is_open in zip(plan.parts, files, open_parts, strict=True):
        work.write(part, file) if is_open else work.skip(part)
    sha256 = None if plan.most else work.sha256
    seconds = time.monotonic() - started
    return Report(
        plan,
        files[0],
        seconds,
        work.resumed,
        False,
        work.tallies(),
        work.resumed_bytes,
        sha256,
        work.remarks,
    )


class Work:
    """A run in progress: the results of each file, and what earlier runs had written."""

    def __init__(
        self, plan: Plan, threads: int, watch: Callable[[Progress], None] = lambda progress: None
    ) -> None:
        self.plan, self.threads, self.watch = plan, threads, watch
        self.sums: dict[str, _TypeTotals] = {}
        self.remarks: dict[str, Remark] = {}
        self.announced = self.resumed = self.resumed_bytes = 0
        self.sha256 = ""

    def write(self, part: Plan, out: Path) -> None:
        """Write one file, from where an earlier run stopped."""
        changed = str(part.source.changed)
        identity = {
            "source": part.source.fingerprint,
            "changed": changed,
            "settings": part.settings,
        }
        if means := sorted({step.method.means() for step in part.steps if step.method} - {""}):
            identity["means"] = ", ".join(means)
        draft = Draft(out, part.layout, identity)
        with draft.open():
            done, row = part.reached(draft.position)
            self.resumed_bytes += draft.resumed
            self._count_resumed(part.steps[:done])
            with closing(stream(part.steps, self.threads, (done, row))) as pieces:
                for piece in pieces:
                    _append_rows(draft, part, piece)
                    self.sums.setdefault(part.steps[piece.index].type, _TypeTotals()).add(piece)
                    if piece.last == (step := part.steps[piece.index]).weight.rows:
                        self._record_report(step, piece)
                        self._announce(step, False)
            self.sha256 = draft.finish()

    def skip(self, part: Plan) -> None:
        """Count a file that an earlier run had finished."""
        self.resumed_bytes += part.layout.nbytes
        self._count_resumed(part.steps)

    def tallies(self) -> tuple[Tally, ...]:
        """Return the rows of the closing table."""
        return tally(self.plan, self.sums, self.threads)

    def _record_report(self, step: Step, piece: Piece) -> None:
        """Record the method's report after the last rows of a tensor. Rows arrive in order, so all
        of them are encoded by then.
        """
        if step.method and piece.solver and (report := step.method.remark(piece.solver)):
            self.remarks[step.weight.name] = report

    def _count_resumed(self, steps: Sequence[Step]) -> None:
        self.resumed += len(steps)
        for step in steps:
            self._announce(step, True)

    def _announce(self, step: Step, resumed: bool) -> None:
        self.announced += 1
        self.watch(Progress(self.announced, len(self.plan.steps), step, resumed))


def _require_disk_space(sizes: Sequence[int], files: Sequence[Path]) -> None:
    """Raise UserError, before the first shard, if the disk is too small for all of them. Unfinished
    files count as free.
    """
    parts = [file.with_name(f".{file.name}.part") for file in files]
    written = (
        sum(part.stat().st_blocks * 512 for part in parts if part.exists())
        if hasattr(os, "posix_fallocate")
        else 0
    )
    need, have = sum(sizes) - written, shutil.disk_usage(files[0].parent).free
    if need > have:
        raise Refusal(
            f"{files[0].parent} has {have:,} bytes free, the {len(files)} shards need {need:,}",
            hint=f"free {need - have:,} bytes, or choose a folder on another disk with -o",
        )


def _append_rows(draft: Draft, plan: Plan, piece: Piece) -> None:
    """Append rows, and record a checkpoint at the end of a slab: a killed run loses at most one
    slab.
    """
    if not piece.first:
        draft.pad(plan.layout.slots[piece.index].offset)
    draft.append(piece.data.data)
    draft.note(now=piece.closes)


def finished(plan: Plan, out: Path) -> bool:
    """Return whether all files of the plan are complete and were made from this source with these
    settings.
    """
    return all(
        _is_finished(part, file) for part, file in zip(plan.parts, plan.files(out), strict=True)
    )


def _is_finished(plan: Plan, out: Path) -> bool:
    if not out.is_file():
        return False
    try:
        header = parse(out)
    except Refusal:
        return False  # some other file, which will be replaced by a complete one
    metadata = {field.key: field.value for field in header.fields}
    table = [(t.name, t.shape, t.type) for t in header.tensors]
    # the fingerprint samples the source and misses a small edit; its modification time does not
    return (
        plan.source.changed <= out.stat().st_mtime_ns
        and metadata.get(SOURCE_KEY) == plan.source.fingerprint
        and metadata.get(SETTINGS_KEY) == plan.settings
        and table == [(s.weight.name, s.weight.shape, s.type) for s in plan.steps]
    )


def check(plan: Plan, out: Path) -> None:
    """Raise UserError if the plan's files cannot be written."""
    for file in plan.files(out):
        check_place(plan.source, file)


def check_place(source: Source, out: Path) -> None:
    """Raise UserError if a file made from `source` cannot be written to `out`."""
    if out.is_dir():
        raise Refusal(f"{out} is a folder", hint=f"name a file: -o {out / 'model.gguf'}")
    if out.exists() and not out.is_file():  # a rename would replace a device by a file
        raise Refusal(f"{out} is no ordinary file", hint="choose another name with -o")
    if out.parent.is_file():
        raise Refusal(f"{out.parent} is a file, not a folder", hint="choose another path with -o")
    if not out.parent.is_dir():
        raise Refusal(
            f"there is no folder {out.parent}", hint=f"create it first: mkdir -p {out.parent}"
        )
    if out.exists() and any(file.exists() and file.samefile(out) for file in source.files):
        raise Refusal(f"{out} is the source itself", hint="choose another name with -o")


class _TypeTotals:
    """The totals of one type: squares of the source and of the errors, and the threads' time."""

    def __init__(self) -> None:
        self.signal = self.noise = self.seconds = 0.0

    def add(self, piece: Piece) -> None:
        self.signal += piece.signal
        self.noise += piece.noise
        self.seconds += piece.seconds

    @property
    def relative(self) -> float | None:
        return sqrt(self.noise / self.signal) if self.signal else None


def tally(
    plan: Plan, sums: Mapping[str, _TypeTotals] | None = None, threads: int = 1
) -> tuple[Tally, ...]:
    """Return one row for each type, the largest first. Without `sums` nothing has been written
    yet.
    """
    rows: dict[str, Tally] = {}
    for step in plan.steps:
        old = rows.get(step.type, Tally(step.type, 0, 0, 0, 0, None, None))
        totals = sums.get(step.type) if sums else None
        error, seconds = (totals.relative, totals.seconds / threads) if totals else (None, None)
        before, after = old.bytes_before + step.weight.nbytes, old.bytes_after + step.nbytes
        elements = old.elements + step.weight.elements
        rows[step.type] = Tally(step.type, old.tensors + 1, before, after, elements, error, seconds)
    return tuple(sorted(rows.values(), key=lambda row: -row.bytes_after))
