"""`quantize --sequential`: block after block, each by the second moments that enter it behind those
that are quantized.

llmcli's calibration reads the text by quant's half-made model, a shard for each block, in a folder
beside the new file. A killed run goes on with the pass, or the tensor, that it was at.
"""

import hashlib
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.catalog import elsewhere
from llmcli.catalog.partial import make_folder
from llmcli.commands import bases, calibrating, gathering, weights
from llmcli.hardware import host
from llmcli.units import size
from quant import blas, container, moments
from quant import quantize as road
from quant.prefix import Group, Prefix, unquantized

if TYPE_CHECKING:
    from llmcli.commands.scorers import Side
    from llmcli.config import Config
    from llmcli.types import Bar
    from llmcli.ui import UI
    from quant.evaluate import Chunks
    from quant.methods.base import Second
    from quant.quantize import Plan, Report

SHARE = 1.1  # of the scratch model, for headers and the moments of a block


def write(
    wish: gathering.Wish,
    config: "Config",
    plan: "Plan",
    out: Path,
    ui: "UI",
    *,
    threads: int = 0,
    force: bool = False,
) -> "Report":
    """As weights.write, which it leaves a file to that is there. `wish` says what is read. Raises
    Refusal.
    """
    road.check(plan, out)
    if not force and road.finished(plan, out):
        return weights.write(plan, out, ui, threads=threads)
    began = time.monotonic()
    with elsewhere.at_work(out, config, ui) as folder, blas.bounded(threads or None):
        if force:
            shutil.rmtree(folder, ignore_errors=True)
        making = _Making(replace(wish, moments=True, threads=threads), config, plan, folder, ui)
        making.run()
        with ui.bar(f"join {out.name}", len(plan.steps), "tensors") as bar:
            whole = road.run(
                making.prefix.whole(),
                out,
                threads=threads,
                force=True,
                watch=lambda progress: bar.advance(1),
            )
        shutil.rmtree(folder)
    work = making.work
    return replace(
        whole,
        plan=plan,
        seconds=time.monotonic() - began,
        resumed=work.resumed,
        tallies=work.tallies(),
        resumed_bytes=work.resumed_bytes,
        remarks=work.remarks,
    )


class _Making:
    """One run under way."""

    def __init__(
        self, wish: gathering.Wish, config: "Config", plan: "Plan", folder: Path, ui: "UI"
    ) -> None:
        self.wish, self.config, self.ui = wish, config, ui
        self.prefix = Prefix(plan, unquantized(plan), folder)
        self.key = hashlib.sha256(
            f"{plan.source.fingerprint} {plan.settings}".encode()
        ).hexdigest()[:16]
        self.threads = wish.threads or host.cores()
        self.work = road.Work(plan, self.threads)
        self.others = self.held = 0

    def run(self) -> None:
        """All groups in their turn."""
        gathering.long_enough(self.wish, self.ui)
        self._lay()
        subject, text, names = gathering.reading(self.prefix.model, self.wish, self.ui)
        left = []
        for group in self.prefix.in_turn:
            if self.prefix.made(group):
                self.work.skip(group.plan)
            else:
                left.append(group)
        if self.work.resumed:
            self.ui.note(
                f"goes on where an earlier run was stopped: {len(left)} groups of tensors are left"
            )
        passes = sum(bool(group.wanted) for group in left)
        self._forecast(text, names, passes)
        took: list[float] = []  # seconds of the groups that the text was read for
        with self.ui.bar(
            f"quantize {self.prefix.plan.source.name}", passes * text.count, "chunks"
        ) as bar:
            for group in left:
                began = time.monotonic()
                bar.describe(f"read {text.count} chunks up to {group.name}")
                seconds = self._gathered(group, subject, text, names, bar) if group.wanted else {}
                bar.describe(f"quantize {group.name}")
                steps = self.prefix.make(group, seconds, self.work)
                pairs = zip(steps, group.plan.steps, strict=True)
                self.others += sum(mine.method != theirs.method for mine, theirs in pairs)
                self._file(group, "moments").unlink(missing_ok=True)
                self._file(group, "sums").unlink(missing_ok=True)
                if group.wanted:
                    took.append(time.monotonic() - began)
                    if len(took) == 2 < passes:
                        self._left(took, passes)
        if self.others:
            self.ui.note(
                f"{self.others} tensors went through another method than was planned: no moments came of them"
            )

    def _lay(self) -> None:
        """The model that is run, as far as it is not there."""
        prefix = self.prefix
        need = sum(group.unmade.layout.nbytes for group in prefix.groups)
        there = prefix.folder.is_dir()
        held = sum(file.stat().st_size for file in prefix.folder.iterdir()) if there else 0
        bases.room(
            {prefix.folder.absolute(): max(0, int(SHARE * need) - held) + prefix.plan.nbytes}
        )
        make_folder(prefix.folder)
        with self.ui.bar(f"a copy to run: {size(need)}", len(prefix.plan.steps), "tensors") as bar:
            for group in prefix.begin(self.threads):
                bar.advance(len(group.plan.steps))

    def _gathered(
        self, group: Group, subject: "Side", text: "Chunks", names: tuple[str, ...], bar: "Bar"
    ) -> "dict[str, Second]":
        """The second moments of a group, from the model as it is now."""
        file = self._file(group, "moments")
        if not file.exists():
            model, source = (
                replace(subject, header=container.read(self.prefix.model)),
                self.prefix.plan.source,
            )
            wish = calibrating.Wish(
                model,
                source.fingerprint,
                text,
                names,
                self._file(group, "sums"),
                file,
                weights=group.wanted,
            )
            self.held = max(self.held, calibrating.run(wish, self.config, self.ui, bar).held)
        if not file.exists():
            return {}
        shapes = [(step.weight.name, step.weight.shape) for step in group.plan.steps]
        return dict(moments.load(file).fitting(shapes))

    def _file(self, group: Group, kind: str) -> Path:
        return self.prefix.folder / f"{self.key}-{group.number}.{kind}.gguf"

    def _forecast(self, text: "Chunks", names: tuple[str, ...], passes: int) -> None:
        """Say what it will take."""
        self.ui.note(
            f"--sequential: {text.ids.size:,} tokens of {names[0]} are read {passes} times, each time one group of "
            f"tensors further; killed at any time, the same command goes on, or `llmcli gc` throws it away"
        )

    def _left(self, took: list[float], passes: int) -> None:
        """Tell how long the rest will take, by the first two groups: each reads further than the
        one before it.
        """
        first, second = took
        left = passes - 2
        seconds = left * second + max(0.0, second - first) * left * (left + 1) / 2
        told = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"
        self.ui.note(
            f"the first two took {first + second:.0f} s, {size(self.held)} for second moments and "
            f"{size(host.resident_memory() or 0)} of memory in all; about {told} are left"
        )
