"""Chooses a type for each tensor within a size limit, by measuring the divergence that each
tensor's quantization causes.

Measurements are cached: another size of the same model, method and text needs no new ones, and an
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
from llmcli.runtime.binding.library import llama_cpp_version
from llmcli.units import format_duration
from llmcli.workflows.evaluation.text import PROBE_CHUNK_TOKENS
from llmcli.workflows.quantization import largest_fit
from llmcli.workflows.quantization.scratch_model import (
    ProbeText,
    ScratchModel,
    open_scratch_model,
)
from quant.allocation import probes, sensitivity
from quant.allocation.allocate import (
    Allocation,
    Budget,
    TypeMenu,
    TypeOption,
    is_reachable,
    reduce_types,
    size_range,
    unreachable_error,
)
from quant.allocation.probes import SensitivityProbe
from quant.allocation.refine import MixRefinement, RefinementTrial
from quant.allocation.sensitivity import F64, PlanFunction, SensitivityRun, TensorSensitivity
from quant.record_log import RecordLog

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.ui import UI
    from llmcli.workflows.quantization.size_request import SizeRequest
    from quant.source.source import Source

MIX_RECORDS_START = 1 << 30  # first record number of mixes; all other records have lower numbers


@dataclass(frozen=True, slots=True)
class AllocationRequest:
    """A request to allocate types.

    `build_plan`: returns the plan of a mix; `build_plain_plan`: returns the plan of a mix without
    the method and the importance of columns. `provenance`: everything except the types that
    determines the bytes of the file; `text_digest`: digest of the probe text; `spare_bytes`: bytes
    of folds and certificate, which are not part of a plan.
    """

    source: "Source"
    build_plan: PlanFunction
    build_plain_plan: PlanFunction
    size: "SizeRequest"
    provenance: Mapping[str, str]
    probe_text: ProbeText
    text_digest: str
    spare_bytes: int = 0


@dataclass(frozen=True, slots=True)
class AllocationResult:
    """The result of an allocation: the types, the sensitivities, and the mixes that were tried.

    `expected_kld`: sum of the measured divergences of the chosen types; None if nothing was
    measured.
    """

    mix: Mapping[str, str]
    sensitivities: Mapping[str, TensorSensitivity]
    budget: Budget
    expected_kld: float | None
    trials: tuple[RefinementTrial, ...]
    positions: int
    seconds: float


def allocate(request: AllocationRequest, config: "Config", ui: "UI") -> AllocationResult:
    """Choose the types. Raises UserError, before anything is measured, if no mix has the requested
    size.
    """
    started_at, sizing = time.perf_counter(), request.size
    types = sensitivity.type_options(request.source, sizing.candidate_types)
    folder, probe_key, error_key = (
        config.cache / "sensitivity",
        _probe_key(request),
        _error_key(request, types),
    )
    make_folder(folder)
    with ExitStack() as stack:
        path = folder / f"{_hash_json(probe_key)}.records"
        stack.enter_context(file_lock.hold_lock(path.with_suffix(".lock"), ui, "this measurement"))
        record_files = [
            _open_records(path, probe_key),
            _open_records(folder / f"{_hash_json(error_key)}.records", error_key),
        ]
        for records in record_files:
            stack.callback(records.close)
        sensing = SensitivityRun(
            request.build_plan,
            request.build_plain_plan,
            types,
            record_files[0],
            record_files[1],
            request.probe_text.threads,
        )
        allocation = _AllocationRun(request, sensing, path.with_suffix(".gguf"), stack, ui)
        budget = target_budget(request.source, request.build_plan, sizing, request.spare_bytes)
        allocation.compute_errors()
        tensor_probes = (
            [] if sizing.quick else probes.all_probes(types, sizing.probe_unit == "group")
        )
        allocation.measure(tensor_probes)
        sensed = sensing.sensitivities(tensor_probes)
        menu = sensitivity.build_menu(sensing, sensed, request.source.alignment)
        budget = budget or allocation.largest_budget(menu)
        best, refinement = reduce_types(menu, budget), None
        if sizing.refinement_trials:
            evaluate = partial(allocation.held_out_divergences, sensed)
            refinement = MixRefinement(menu, budget, evaluate, sizing.refinement_trials)
            best = allocation.refine(refinement, best)
        return AllocationResult(
            allocation.complete_mix(best.mix),
            sensed,
            budget,
            None if sizing.quick else best.loss,
            tuple(refinement.trials) if refinement else (),
            allocation.positions,
            time.perf_counter() - started_at,
        )


class _AllocationRun:
    """One allocation in progress. The scratch copy is written when it is needed for the first time."""

    def __init__(
        self,
        request: AllocationRequest,
        sensing: SensitivityRun,
        path: Path,
        stack: ExitStack,
        ui: "UI",
    ) -> None:
        self.request, self.sensing, self.path, self.ui = request, sensing, path, ui
        self._open = stack
        self._stage: ScratchModel | None = None
        self._loaded_types: dict[str, str] = {}
        self._pass = 0.0  # duration of one measurement
        self._closed = {name: kinds[0] for name, kinds in sensing.types.items() if len(kinds) == 1}
        self.positions = 0
        self.fixed = _fixed_bytes(
            request.source, request.build_plan, sensing.types, request.spare_bytes
        )

    def complete_mix(self, mix: Mapping[str, str]) -> dict[str, str]:
        """Return a mix with all tensors: `mix`, plus the tensors that have only one possible type."""
        return self._closed | dict(mix)

    def largest_budget(self, menu: TypeMenu) -> Budget:
        """Return the budget for the largest file that runs in the free memory."""
        # another path, because the scratch copy may be open
        fit_path = self.path.with_name(f"fit-{self.path.name}")
        max_bytes = largest_fit.largest_file_that_fits(
            menu, self.fixed, lambda mix: self.request.build_plan(self.complete_mix(mix)), fit_path
        )
        _, largest_mix = size_range(menu)
        limit_note = (
            "; no mix of these types is larger" if max_bytes == largest_mix + self.fixed else ""
        )
        self.ui.note(
            f"--fit: a file of {max_bytes:,} bytes runs in the free memory with the default "
            f"context{limit_note}"
        )
        return Budget(max_bytes, self.fixed)

    def compute_errors(self) -> None:
        """Compute the error of every type for every tensor, on some of the tensor's rows."""
        with self.ui.bar(
            "errors of all types", len(self.sensing.open_names), unit="tensors"
        ) as bar:
            for name in self.sensing.measure_errors():
                bar.advance(1)
                bar.describe(f"errors of all types: {name}")

    def measure(self, tensor_probes: Sequence[SensitivityProbe]) -> None:
        """Measure the divergence of each probe that is not in the cache."""
        n_cached = self.sensing.count_measured(tensor_probes)
        if n_cached:
            self.ui.note(f"{n_cached} of {len(tensor_probes)} measurements were made before")
        if n_cached == len(tensor_probes):
            return
        stage = self.open_scratch()
        n_remaining, pass_seconds = len(tensor_probes) - n_cached, self._pass
        n_own_codes = sum(probe.uses_run_codes for probe in tensor_probes)
        self.ui.note(
            f"to measure: {n_remaining} x {pass_seconds:.1f} s = about "
            f"{format_duration(n_remaining * pass_seconds)}; {n_own_codes} of "
            f"{len(tensor_probes)} also need the method's own codes; Ctrl-C loses nothing"
        )
        with self.ui.bar("measure", len(tensor_probes), unit="tensors", done=n_cached) as bar:
            for probe in self.sensing.measure(tensor_probes, stage):
                bar.advance(1)
                bar.describe(f"measure {probe.label}")

    def refine(self, refinement: MixRefinement, allocation: Allocation) -> Allocation:
        """Try other mixes on held-out text and return the best allocation."""
        with self.ui.bar("mixes on held-out text", refinement.max_trials + 1, unit="tests") as bar:
            for best in refinement.run(allocation):
                allocation = best
                bar.advance(1)
                trial = refinement.trials[-1]
                bar.describe(
                    f"mixes on held-out text: {trial.role or 'as measured'} {trial.kld:.5f}"
                )
        return allocation

    def held_out_divergences(
        self, sensitivities: Mapping[str, TensorSensitivity], mix: Mapping[str, str]
    ) -> F64:
        """Return the divergences of a mix at the held-out positions, plus the divergence that
        rounding of the inputs is known to add. Shape: `[positions]`.
        """
        return self._read(mix) + sum(
            sensitivities[name].input_kld(kind) for name, kind in mix.items()
        )

    def _read(self, mix: Mapping[str, str]) -> F64:
        """Return the divergences of a mix at the held-out positions, measured with inputs that are
        not rounded. Shape: `[positions]`.
        """
        digest = hashlib.sha256(json.dumps(sorted(mix.items())).encode()).digest()
        number = MIX_RECORDS_START | int.from_bytes(digest[:4]) >> 2
        if number in self.sensing.run_store.numbers:
            raw = self.sensing.run_store.read(number)
            if raw[:32] == digest:
                cached: F64 = np.frombuffer(raw[32:], "<f8")
                self.positions = len(cached)
                return cached
        stage = self.open_scratch()
        steps = [
            self.sensing.step(name, kind)
            for name, kind in mix.items()
            if self._loaded_types.get(name) != kind
        ]
        sensitivity.write_codes(steps, stage, self.request.probe_text.threads)
        self._loaded_types |= mix
        divergences = stage.divergence(held_out=True)
        self.sensing.run_store.append({number: digest + divergences.astype("<f8").tobytes()})
        self.positions = len(divergences)
        return divergences

    def open_scratch(self) -> ScratchModel:
        """Return the scratch copy. The first call writes and opens it, with unchanged weights."""
        if self._stage is None:
            size = 2 * sum(weight.elements for weight in self.request.source.weights)
            self.ui.note(f"writing a scratch copy of {size:,} bytes to {self.path.parent}")
            self._stage = self._open.enter_context(
                open_scratch_model(self.request.source, self.path, self.request.probe_text, self.ui)
            )
            started_at = time.perf_counter()
            self._stage.divergence()
            self._pass = time.perf_counter() - started_at
        return self._stage


def target_budget(
    source: "Source", build_plan: PlanFunction, size: "SizeRequest", spare_bytes: int = 0
) -> Budget | None:
    """Return the requested size as a budget of bytes; None if the free memory decides the size.

    Raises UserError, before anything is measured, if no mix has the requested size.
    """
    max_bytes = size.max_bytes(sum(weight.elements for weight in source.weights))
    if max_bytes is None:
        return None
    types = sensitivity.type_options(source, size.candidate_types)
    budget = Budget(max_bytes, _fixed_bytes(source, build_plan, types, spare_bytes))
    # options that are compared by size alone: larger is better
    size_options: dict[str, list[TypeOption]] = {}
    for (name, kind), step in sensitivity.steps_by_type(build_plan, types).items():
        if len(types.get(name, ())) > 1:
            nbytes = sensitivity.padded_bytes(step, source.alignment)
            size_options.setdefault(name, []).append(TypeOption(kind, nbytes, -nbytes))
    if not is_reachable(size_options, budget):
        raise unreachable_error(size_options, budget)
    return budget


def _fixed_bytes(
    source: "Source", build_plan: PlanFunction, types: Mapping[str, Sequence[str]], spare_bytes: int
) -> int:
    """Return the number of bytes in the file that do not depend on the chosen types."""
    any_plan = build_plan({name: kinds[0] for name, kinds in types.items()})
    chosen = (step for step in any_plan.steps if len(types.get(step.weight.name, ())) > 1)
    chosen_bytes = sum(sensitivity.padded_bytes(step, source.alignment) for step in chosen)
    return any_plan.nbytes - chosen_bytes + spare_bytes


def _probe_key(request: AllocationRequest) -> dict[str, Any]:
    """Return everything that the divergence of a probe depends on.

    The fingerprint may miss a small edit of the source, but the time stamp shows it.
    """
    return {
        "kind": "sensitivity",
        "source": request.source.fingerprint,
        "changed": str(request.source.newest_mtime_ns),
        # all tensors are numbered; older record files number only those with a choice of types
        "numbered": "all",
        "text": request.text_digest,
        "probe": request.size.probe_unit,
        "n_ctx": PROBE_CHUNK_TOKENS,
        "chunks": request.probe_text.probe_chunks,
        "build": llama_cpp_version(),
    }


def _error_key(request: AllocationRequest, types: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return everything that the errors of the types and the divergences of mixes depend on."""
    kinds = _hash_json({name: list(kinds) for name, kinds in types.items()})
    return _probe_key(request) | {
        "kind": "errors",
        "steered": dict(request.provenance),
        "types": kinds,
        "held_out": request.probe_text.held_out_chunks,
        # an embedding that is also the output head counts for both; in older record files it counts
        # only as the head
        "tied": "both",
        # inputs are rounded as in llama.cpp; older record files contain only the errors of the
        # weights
        "inputs": "rounded",
    }


def _open_records(path: Path, head: dict[str, Any]) -> RecordLog:
    """Open the record file if it has this head; otherwise create a new one."""
    records = RecordLog.resume(path)
    if records is not None and records.head == head:
        return records
    if records is not None:
        records.close()
    return RecordLog.create(path, head)


def _hash_json(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:40]
