"""Chooses a type for each tensor under a size limit, by measuring what each tensor's quantization
costs.

Measurements are cached: another size of the same model, method and text needs none, and an
interrupted run resumes.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmcli import file_lock
from llmcli.atomic_files import make_folder
from llmcli.runtime.binding.library import version
from llmcli.workflows.quantization import largest_fit
from llmcli.workflows.quantization.scratch_model import N_CTX, Reading, Stage, staged
from quant.allocation import probes, sensitivity
from quant.allocation.allocate import (
    Allocation,
    Budget,
    Menu,
    Option,
    few,
    in_reach,
    reach,
    refusal,
)
from quant.allocation.probes import Probe
from quant.allocation.refine import Trades, Trial
from quant.allocation.sensitivity import F64, Planned, Sensed, Sensing
from quant.record_log import Records

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.ui import UI
    from llmcli.workflows.quantization.size_request import Sizing
    from quant.source.source import Source

READ = 1 << 30  # record numbers of mixes begin here, above all others


@dataclass(frozen=True, slots=True)
class Wish:
    """The request of an allocation.

    `build_plan`: returns the plan of a mix; `build_plain_plan`: without method and importance.
    `provenance`: what determines the bytes besides the types; `text_digest`: digest of the probe
    text; `spare_bytes`: bytes of folds and certificate, which no plan contains.
    """

    source: "Source"
    planned: Planned
    plain: Planned
    sizing: "Sizing"
    steered: Mapping[str, str]
    reading: Reading
    text: str
    spare: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an allocation: the types, the sensitivities, and the mixes that were tried.

    `expected_kld`: sum of the measured divergences, None if nothing was measured.
    """

    mix: Mapping[str, str]
    sensed: Mapping[str, Sensed]
    budget: Budget
    expected: float | None
    trials: tuple[Trial, ...]
    positions: int
    seconds: float


def run(request: Wish, config: "Config", ui: "UI") -> Outcome:
    """Allocate types. Raises UserError, before anything is measured, for a size that no mix
    reaches.
    """
    started_at, sizing = time.perf_counter(), request.sizing
    types = sensitivity.options(request.source, sizing.kinds)
    folder, probe_key, error_key = (
        config.cache / "sensitivity",
        _probe_key(request),
        _error_key(request, types),
    )
    make_folder(folder)
    with ExitStack() as stack:
        path = folder / f"{_hash_json(probe_key)}.records"
        stack.enter_context(file_lock.locked(path.with_suffix(".lock"), ui, "this measurement"))
        record_files = [
            _open_records(path, probe_key),
            _open_records(folder / f"{_hash_json(error_key)}.records", error_key),
        ]
        for records in record_files:
            stack.callback(records.close)
        sensing = Sensing(
            request.planned,
            request.plain,
            types,
            record_files[0],
            record_files[1],
            request.reading.threads,
        )
        allocation = _AllocationRun(request, sensing, path.with_suffix(".gguf"), stack, ui)
        budget = reachable(request.source, request.planned, sizing, request.spare)
        allocation.weigh()
        tensor_probes = [] if sizing.quick else probes.probes(types, sizing.unit == "group")
        allocation.measure(tensor_probes)
        sensed = sensing.sensed(tensor_probes)
        menu = sensitivity.menu(sensing, sensed, request.source.alignment)
        budget = budget or allocation.fitting(menu)
        best, refinement = few(menu, budget), None
        if sizing.tries:
            evaluate = partial(allocation.judge, sensed)
            refinement = Trades(menu, budget, evaluate, sizing.tries)
            best = allocation.trade(refinement, best)
        return Outcome(
            allocation.whole(best.mix),
            sensed,
            budget,
            None if sizing.quick else best.loss,
            tuple(refinement.trials) if refinement else (),
            allocation.positions,
            time.perf_counter() - started_at,
        )


class _AllocationRun:
    """One allocation in progress; the scratch copy is written when it is first needed."""

    def __init__(
        self, request: Wish, sensing: Sensing, path: Path, stack: ExitStack, ui: "UI"
    ) -> None:
        self.request, self.sensing, self.path, self.ui = request, sensing, path, ui
        self._open = stack
        self._stage: Stage | None = None
        self._loaded_types: dict[str, str] = {}
        self._pass = 0.0  # seconds of one measurement
        self._closed = {name: kinds[0] for name, kinds in sensing.types.items() if len(kinds) == 1}
        self.positions = 0
        self.fixed = _fixed_bytes(request.source, request.planned, sensing.types, request.spare)

    def whole(self, mix: Mapping[str, str]) -> dict[str, str]:
        """Return a mix completed by the tensors that have no choice."""
        return self._closed | dict(mix)

    def fitting(self, menu: Menu) -> Budget:
        """Return the budget of the largest file that runs in the free memory."""
        fit_path = self.path.with_name(f"fit-{self.path.name}")  # the scratch copy may be open
        max_bytes = largest_fit.largest(
            menu, self.fixed, lambda mix: self.request.planned(self.whole(mix)), fit_path
        )
        _, largest_mix = reach(menu)
        limit_note = (
            "; no mix of these types is larger" if max_bytes == largest_mix + self.fixed else ""
        )
        self.ui.note(
            f"--fit: a file of {max_bytes:,} bytes runs in the free memory with the default "
            f"context{limit_note}"
        )
        return Budget(max_bytes, self.fixed)

    def weigh(self) -> None:
        """Compute the errors of all types on rows of every tensor."""
        with self.ui.bar("errors of all types", len(self.sensing.open), unit="tensors") as bar:
            for name in self.sensing.weigh():
                bar.advance(1)
                bar.describe(f"errors of all types: {name}")

    def measure(self, parts: Sequence[Probe]) -> None:
        """Measure the divergence of each probe that is not cached."""
        n_cached = self.sensing.known(parts)
        if n_cached:
            self.ui.note(f"{n_cached} of {len(parts)} measurements were made before")
        if n_cached == len(parts):
            return
        stage = self.stage()
        n_remaining, pass_seconds = len(parts) - n_cached, self._pass
        n_own_codes = sum(probe.own for probe in parts)
        self.ui.note(
            f"to measure: {n_remaining} x {pass_seconds:.1f} s = about "
            f"{_format_duration(n_remaining * pass_seconds)}; {n_own_codes} of "
            f"{len(parts)} also need the method's own codes; Ctrl-C loses nothing"
        )
        with self.ui.bar("measure", len(parts), unit="tensors", done=n_cached) as bar:
            for probe in self.sensing.measure(parts, stage):
                bar.advance(1)
                bar.describe(f"measure {probe.label}")

    def trade(self, trades: Trades, found: Allocation) -> Allocation:
        """Try other mixes on held-out text."""
        with self.ui.bar("mixes on held-out text", trades.most + 1, unit="tests") as bar:
            for best in trades.run(found):
                found = best
                bar.advance(1)
                trial = trades.trials[-1]
                bar.describe(
                    f"mixes on held-out text: {trial.role or 'as measured'} {trial.kld:.5f}"
                )
        return found

    def judge(self, sensed: Mapping[str, Sensed], mix: Mapping[str, str]) -> F64:
        """Return the divergences of a mix at the held-out positions, plus the known cost of
        rounding its inputs; `[positions]`.
        """
        return self._read(mix) + sum(sensed[name].unseen(kind) for name, kind in mix.items())

    def _read(self, mix: Mapping[str, str]) -> F64:
        """Return the divergences of a mix at the held-out positions, with unrounded inputs;
        `[positions]`.
        """
        digest = hashlib.sha256(json.dumps(sorted(mix.items())).encode()).digest()
        number = READ | int.from_bytes(digest[:4]) >> 2
        if number in self.sensing.errors.numbers:
            raw = self.sensing.errors.get(number)
            if raw[:32] == digest:
                cached: F64 = np.frombuffer(raw[32:], "<f8")
                self.positions = len(cached)
                return cached
        stage = self.stage()
        steps = [
            self.sensing.step(name, kind)
            for name, kind in mix.items()
            if self._loaded_types.get(name) != kind
        ]
        sensitivity.show(steps, stage, self.request.reading.threads)
        self._loaded_types |= mix
        divergences = stage.apart(held_out=True)
        self.sensing.errors.put({number: digest + divergences.astype("<f8").tobytes()})
        self.positions = len(divergences)
        return divergences

    def stage(self) -> Stage:
        """Return the scratch copy; the first call opens it unchanged."""
        if self._stage is None:
            size = 2 * sum(weight.elements for weight in self.request.source.weights)
            self.ui.note(f"writing a scratch copy of {size:,} bytes to {self.path.parent}")
            self._stage = self._open.enter_context(
                staged(self.request.source, self.path, self.request.reading, self.ui)
            )
            started_at = time.perf_counter()
            self._stage.apart()
            self._pass = time.perf_counter() - started_at
        return self._stage


def reachable(
    source: "Source", planned: Planned, sizing: "Sizing", spare: int = 0
) -> Budget | None:
    """Return the target as a budget of bytes; None if memory decides.

    Raises UserError, before anything is measured, if no mix reaches it.
    """
    max_bytes = sizing.most(sum(weight.elements for weight in source.weights))
    if max_bytes is None:
        return None
    types = sensitivity.options(source, sizing.kinds)
    budget = Budget(max_bytes, _fixed_bytes(source, planned, types, spare))
    size_options: dict[str, list[Option]] = {}  # by size alone: larger is better
    for (name, kind), step in sensitivity.choices(planned, types).items():
        if len(types.get(name, ())) > 1:
            nbytes = sensitivity.room(step, source.alignment)
            size_options.setdefault(name, []).append(Option(kind, nbytes, -nbytes))
    if not in_reach(size_options, budget):
        raise refusal(size_options, budget)
    return budget


def _fixed_bytes(
    source: "Source", planned: Planned, types: Mapping[str, Sequence[str]], spare: int
) -> int:
    """Return the bytes of the file that do not depend on the chosen types."""
    any_plan = planned({name: kinds[0] for name, kinds in types.items()})
    chosen = (step for step in any_plan.steps if len(types.get(step.weight.name, ())) > 1)
    chosen_bytes = sum(sensitivity.room(step, source.alignment) for step in chosen)
    return any_plan.nbytes - chosen_bytes + spare


def _probe_key(request: Wish) -> dict[str, Any]:
    """Return everything that the divergence of a probe depends on.

    The fingerprint may miss a small edit of the source; its time stamp does not.
    """
    return {
        "kind": "sensitivity",
        "source": request.source.fingerprint,
        "changed": str(request.source.changed),
        # tensors are numbered with and without a choice; older files numbered only those with one
        "numbered": "all",
        "text": request.text,
        "probe": request.sizing.unit,
        "n_ctx": N_CTX,
        "chunks": request.reading.measured,
        "build": version(),
    }


def _error_key(request: Wish, types: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return everything that the errors of codes and the divergence of a mix depend on."""
    kinds = _hash_json({name: list(kinds) for name, kinds in types.items()})
    return _probe_key(request) | {
        "kind": "errors",
        "steered": dict(request.steered),
        "types": kinds,
        "held_out": request.reading.held_out,
        # an embedding that is also the head counts for both; older files counted the head alone
        "tied": "both",
        # inputs are rounded as in llama.cpp; older files have the errors of the weights alone
        "inputs": "rounded",
    }


def _open_records(path: Path, head: dict[str, Any]) -> Records:
    """Open the record file if it has this head, else create it."""
    records = Records.resume(path)
    if records is not None and records.head == head:
        return records
    if records is not None:
        records.close()
    return Records.begin(path, head)


def _hash_json(told: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:40]


def _format_duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
