"""The road from a source to a smaller GGUF: what was planned is written in one pass, tensor by
tensor.

It knows plans, drafts and rows; where a source comes from and who watches is others' affair. The
bytes of every tensor equal llama.cpp's own (`llama_model_quantize` of the same library).
"""

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path

from quant import container, native, recipe
from quant.draft import Draft
from quant.errors import Refusal
from quant.header import parse
from quant.methods.base import Remark
from quant.pipeline import Piece, stream
from quant.planning import DROPPED, SETTINGS_KEY, SOURCE_KEY, Plan, Step, plan, sketch, transform_of
from quant.recipe import Facts
from quant.source import Source, Weight, stored_rows

__all__ = [
    "SETTINGS_KEY",
    "SOURCE_KEY",
    "Plan",
    "Progress",
    "Report",
    "Step",
    "Tally",
    "Work",
    "check",
    "finished",
    "open_gguf",
    "plan",
    "run",
    "sketch",
    "tally",
]


@dataclass(frozen=True, slots=True)
class Progress:
    """One tensor is finished: number `index` (from 1) of `count`; `resumed` if an earlier run had
    made it.
    """

    index: int
    count: int
    step: Step
    resumed: bool


@dataclass(frozen=True, slots=True)
class Tally:
    """One line of the closing table: `error` is the relative RMS of the new codes against the
    source.

    `error` and `seconds` speak of what this run made; None for both where it made nothing.
    `seconds` is the time of the threads by their number: this type's share of the whole where they
    never had to wait.
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
        """Bits a value takes in this type."""
        return self.bytes_after * 8 / self.elements


@dataclass(frozen=True, slots=True)
class Report:
    """What a run did. `present` means that the finished file was there already and nothing was
    done.

    An earlier run had made `resumed` whole tensors, the first `resumed_bytes` of the file. `sha256`
    is the file's; None where it was there already: nothing was read. `remarks` are the methods', by
    the tensors' names.
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
    """Take a GGUF file of any type as a source; weights stay in the file until they are wanted."""
    header = container.read(path)
    if not header.tensors:
        raise Refusal(
            f"{path} holds no tensors, only a vocabulary", hint="name a file with weights"
        )
    container.check_model(header)
    heads = header.number("attention.head_count") or 0
    kv_heads = header.number("attention.head_count_kv")
    layers = header.number("block_count")
    facts = Facts(
        architecture=header.architecture,
        layers=max(recipe.order(t.name)[0] for t in header.tensors) + 1
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
            stored_rows(t.file, t.offset, native.row_bytes(t.type, t.columns), t.name),
        )
        for t in header.tensors
    )
    entries = tuple(
        (field.key, field.copy()) for field in header.fields if field.key not in DROPPED
    )
    match = container.SHARD.match(path.name)
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
    """Write `out`, or its shards, each whole or not at all; goes on where an interrupted run of the
    plan stopped.

    `threads` 0 takes all cores. An `out` that this plan made before is left alone unless `force`;
    any other file there stays until the new one is complete.
    """
    began, files = time.monotonic(), plan.files(out)
    check(plan, out)
    if not force and finished(plan, out):
        return Report(plan, files[0], time.monotonic() - began, 0, True, tally(plan))
    work = Work(plan, threads or os.cpu_count() or 1, watch)
    open_parts = [
        force or not _finished(part, file) for part, file in zip(plan.parts, files, strict=True)
    ]
    if plan.most:
        _room(
            [part.layout.nbytes for part, left in zip(plan.parts, open_parts, strict=True) if left],
            files,
        )
    for part, file, left in zip(plan.parts, files, open_parts, strict=True):
        work.write(part, file) if left else work.skip(part)
    sha256 = None if plan.most else work.sha256
    seconds = time.monotonic() - began
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
    """A run under way: what it made of each file, and what earlier runs had made."""

    def __init__(
        self, plan: Plan, threads: int, watch: Callable[[Progress], None] = lambda progress: None
    ) -> None:
        self.plan, self.threads, self.watch = plan, threads, watch
        self.sums: dict[str, _Sums] = {}
        self.remarks: dict[str, Remark] = {}
        self.seen = self.resumed = self.resumed_bytes = 0
        self.sha256 = ""

    def write(self, part: Plan, out: Path) -> None:
        """Make one file, from where an earlier run stopped."""
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
            self._there(part.steps[:done])
            with closing(stream(part.steps, self.threads, (done, row))) as pieces:
                for piece in pieces:
                    _append(draft, part, piece)
                    self.sums.setdefault(part.steps[piece.index].type, _Sums()).add(piece)
                    if piece.last == (step := part.steps[piece.index]).weight.rows:
                        self._remarked(step, piece)
                        self._told(step, False)
            self.sha256 = draft.finish()

    def skip(self, part: Plan) -> None:
        """A file that an earlier run had finished."""
        self.resumed_bytes += part.layout.nbytes
        self._there(part.steps)

    def tallies(self) -> tuple[Tally, ...]:
        return tally(self.plan, self.sums, self.threads)

    def _remarked(self, step: Step, piece: Piece) -> None:
        """Ask once the last piece is there: pieces come in order, so all others have been made,
        too.
        """
        if step.method and piece.solver and (found := step.method.remark(piece.solver)):
            self.remarks[step.weight.name] = found

    def _there(self, steps: Sequence[Step]) -> None:
        self.resumed += len(steps)
        for step in steps:
            self._told(step, True)

    def _told(self, step: Step, resumed: bool) -> None:
        self.seen += 1
        self.watch(Progress(self.seen, len(self.plan.steps), step, resumed))


def _room(sizes: Sequence[int], files: Sequence[Path]) -> None:
    """Refuse before the first shard where the disk is too small for all; what was begun counts as
    free.
    """
    parts = [file.with_name(f".{file.name}.part") for file in files]
    held = (
        sum(part.stat().st_blocks * 512 for part in parts if part.exists())
        if hasattr(os, "posix_fallocate")
        else 0
    )
    need, have = sum(sizes) - held, shutil.disk_usage(files[0].parent).free
    if need > have:
        raise Refusal(
            f"{files[0].parent} has {have:,} bytes free, the {len(files)} shards need {need:,}",
            hint=f"free {need - have:,} bytes, or choose a place on another disk with -o",
        )


def _append(draft: Draft, plan: Plan, piece: Piece) -> None:
    """Write a piece, and note it where a slab ends: a run that is killed loses a slab at most."""
    if not piece.first:
        draft.pad(plan.layout.slots[piece.index].offset)
    draft.append(piece.data.data)
    draft.note(now=piece.closes)


def finished(plan: Plan, out: Path) -> bool:
    """Whether all that `plan` writes is complete and was made from this source with these settings."""
    return all(
        _finished(part, file) for part, file in zip(plan.parts, plan.files(out), strict=True)
    )


def _finished(plan: Plan, out: Path) -> bool:
    if not out.is_file():
        return False
    try:
        header = parse(out)
    except Refusal:
        return False  # something else stands there: it will be replaced by a complete file
    told = {field.key: field.value for field in header.fields}
    table = [(t.name, t.shape, t.type) for t in header.tensors]
    return (
        plan.source.changed
        <= out.stat().st_mtime_ns  # samples miss a small edit; its time does not
        and told.get(SOURCE_KEY) == plan.source.fingerprint
        and told.get(SETTINGS_KEY) == plan.settings
        and table == [(s.weight.name, s.weight.shape, s.type) for s in plan.steps]
    )


def check(plan: Plan, out: Path) -> None:
    """Raise Refusal where what `plan` writes cannot go."""
    for file in plan.files(out):
        check_place(plan.source, file)


def check_place(source: Source, out: Path) -> None:
    """Raise Refusal where one file made of `source` cannot go."""
    if out.is_dir():
        raise Refusal(f"{out} is a folder", hint=f"name a file: -o {out / 'model.gguf'}")
    if out.exists() and not out.is_file():  # a rename would put a file in a device's place
        raise Refusal(f"{out} is no ordinary file", hint="choose another name with -o")
    if out.parent.is_file():
        raise Refusal(f"{out.parent} is a file, no folder", hint="choose another place with -o")
    if not out.parent.is_dir():
        raise Refusal(
            f"there is no folder {out.parent}", hint=f"make it first: mkdir -p {out.parent}"
        )
    if out.exists() and any(file.exists() and file.samefile(out) for file in source.files):
        raise Refusal(f"{out} is the source itself", hint="choose another name with -o")


class _Sums:
    """What one type adds up to: squares of the source and of the differences, and the time its
    threads took.
    """

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
    plan: Plan, sums: Mapping[str, _Sums] | None = None, threads: int = 1
) -> tuple[Tally, ...]:
    """One line a type, the largest first; without `sums`, before anything has been written."""
    rows: dict[str, Tally] = {}
    for step in plan.steps:
        old = rows.get(step.type, Tally(step.type, 0, 0, 0, 0, None, None))
        own = sums.get(step.type) if sums else None
        error, seconds = (own.relative, own.seconds / threads) if own else (None, None)
        before, after = old.bytes_before + step.weight.nbytes, old.bytes_after + step.nbytes
        elements = old.elements + step.weight.elements
        rows[step.type] = Tally(step.type, old.tensors + 1, before, after, elements, error, seconds)
    return tuple(sorted(rows.values(), key=lambda row: -row.bytes_after))
