"""Chooses a quantization type for each tensor, so that the file stays within a size limit and the
model's answers change least. The KL divergence that the quantization of each tensor causes is
measured.

Measurements are cached, so another size with the same model, method and text needs no new ones, and
an interrupted run resumes.
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

# Record numbers from here on are measurements of mixes; lower numbers are other measurements.
MIX_RECORDS_START = 1 << 30


@dataclass(frozen=True, slots=True)
class AllocationRequest:
    """A request to choose a type for each tensor. A mix is a type for each tensor, by tensor name.

    `build_plan`: returns the plan of a mix. `build_plain_plan`: returns the plan of a mix that uses
    neither the method nor the importance of columns. `provenance`: everything except the types that
    determines the bytes of the file. `text_digest`: digest of the probe text. `spare_bytes`: bytes
    of folds and certificate, which a plan does not include.
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
    """The result of an allocation: the chosen mix, the sensitivity of each tensor, and the mixes
    that were tried.

    `expected_kld`: the sum of the measured divergences of the chosen types; None if nothing was
    measured. `positions`: number of held-out positions on which mixes were tried.
    """

    mix: Mapping[str, str]
    sensitivities: Mapping[str, TensorSensitivity]
    budget: Budget
    expected_kld: float | None
    trials: tuple[RefinementTrial, ...]
    positions: int
    seconds: float


def allocate(request: AllocationRequest, config: "Config", ui: "UI") -> AllocationResult:
    """Choose a type for each tensor. Raises UserError before anything is measured if no mix has the
    requested size.
    """
    started_at, sizing = time.perf_counter(), request.size
    types = _type_choices(request.source, request.build_plan, sizing.candidate_types)
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
        sensitivity_run = SensitivityRun(
            request.build_plan,
            request.build_plain_plan,
            types,
            record_files[0],
            record_files[1],
            request.probe_text.threads,
        )
        allocation = _AllocationRun(request, sensitivity_run, path.with_suffix(".gguf"), stack, ui)
        budget = target_budget(request.source, request.build_plan, sizing, request.spare_bytes)
        allocation.compute_errors()
        tensor_probes = (
            [] if sizing.quick else probes.all_probes(types, sizing.probe_unit == "group")
        )
        allocation.measure(tensor_probes)
        sensitivities = sensitivity_run.sensitivities(tensor_probes)
        menu = sensitivity.build_menu(sensitivity_run, sensitivities, request.source.alignment)
        budget = budget or allocation.largest_budget(menu)
        best, refinement = reduce_types(menu, budget), None
        if sizing.refinement_trials:
            evaluate = partial(allocation.held_out_divergences, sensitivities)
            refinement = MixRefinement(menu, budget, evaluate, sizing.refinement_trials)
            best = allocation.refine(refinement, best)
        return AllocationResult(
            allocation.complete_mix(best.mix),
            sensitivities,
            budget,
            None if sizing.quick else best.loss,
            tuple(refinement.trials) if refinement else (),
            allocation.positions,
            time.perf_counter() - started_at,
        )


class _AllocationRun:
    """One allocation in progress. A scratch copy of the model is written when it is first
    needed.
    """

    def __init__(
        self,
        request: AllocationRequest,
        sensitivity_run: SensitivityRun,
        path: Path,
        stack: ExitStack,
        ui: "UI",
    ) -> None:
        self.request, self.sensitivity_run, self.path, self.ui = request, sensitivity_run, path, ui
        self._exit_stack = stack
        self._scratch_model: ScratchModel | None = None
        self._loaded_types: dict[str, str] = {}
        self._pass_seconds = 0.0  # duration of one measurement
        # tensors that have only one possible type
        self._fixed_types = {
            name: kinds[0] for name, kinds in sensitivity_run.types.items() if len(kinds) == 1
        }
        self.positions = 0
        self.fixed = _fixed_bytes(
            request.source, request.build_plan, sensitivity_run.types, request.spare_bytes
        )

    def complete_mix(self, mix: Mapping[str, str]) -> dict[str, str]:
        """Return `mix` with the tensors added that have only one possible type."""
        return self._fixed_types | dict(mix)

    def largest_budget(self, menu: TypeMenu) -> Budget:
        """Return the budget for the largest file with which the model runs in the free memory.
        `menu`: the possible types of each tensor.
        """
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
        """Compute the error of each tensor in each type, on a sample of the tensor's rows."""
        with self.ui.bar(
            "errors of all types", len(self.sensitivity_run.open_names), unit="tensors"
        ) as bar:
            for name in self.sensitivity_run.measure_errors():
                bar.advance(1)
                bar.describe(f"errors of all types: {name}")

    def measure(self, tensor_probes: Sequence[SensitivityProbe]) -> None:
        """Measure the divergence that each probe causes, unless it is cached. A probe quantizes one
        tensor, or a group of tensors.
        """
        n_cached = self.sensitivity_run.count_measured(tensor_probes)
        if n_cached:
            self.ui.note(f"{n_cached} of {len(tensor_probes)} measurements were made before")
        if n_cached == len(tensor_probes):
            return
        scratch_model = self.open_scratch()
        n_remaining, pass_seconds = len(tensor_probes) - n_cached, self._pass_seconds
        n_own_codes = sum(probe.uses_run_codes for probe in tensor_probes)
        self.ui.note(
            f"to measure: {n_remaining} x {pass_seconds:.1f} s = about "
            f"{format_duration(n_remaining * pass_seconds)}; {n_own_codes} of "
            f"{len(tensor_probes)} also need the method's own codes; Ctrl-C loses nothing, and "
            "--quick needs no measurement"
        )
        with self.ui.bar("measure", len(tensor_probes), unit="tensors", done=n_cached) as bar:
            for probe in self.sensitivity_run.measure(tensor_probes, scratch_model):
                bar.advance(1)
                bar.describe(f"measure {probe.label}")

    def refine(self, refinement: MixRefinement, allocation: Allocation) -> Allocation:
        """Try variants of an allocation on held-out text, and return the best one."""
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
        """Return the KL divergence of a mix at each held-out position, including the estimated
        effect of rounding the activations. Shape: `[positions]`.
        """
        return self._measure_mix(mix) + sum(
            sensitivities[name].input_kld(kind) for name, kind in mix.items()
        )

    def _measure_mix(self, mix: Mapping[str, str]) -> F64:
        """Return the KL divergence of a mix at each held-out position, measured without rounding
        the activations. Shape: `[positions]`.
        """
        digest = hashlib.sha256(json.dumps(sorted(mix.items())).encode()).digest()
        number = MIX_RECORDS_START | int.from_bytes(digest[:4]) >> 2
        run_store = self.sensitivity_run.run_store
        if number in run_store.numbers:
            raw = run_store.read(number)
            if raw[:32] == digest:
                cached: F64 = np.frombuffer(raw[32:], "<f8")
                self.positions = len(cached)
                return cached
        scratch_model = self.open_scratch()
        steps = [
            self.sensitivity_run.step(name, kind)
            for name, kind in mix.items()
            if self._loaded_types.get(name) != kind
        ]
        sensitivity.write_codes(steps, scratch_model, self.request.probe_text.threads)
        self._loaded_types |= mix
        divergences = scratch_model.divergence(held_out=True)
        run_store.append({number: digest + divergences.astype("<f8").tobytes()})
        self.positions = len(divergences)
        return divergences

    def open_scratch(self) -> ScratchModel:
        """Return the scratch copy of the model. The first call writes and opens it, with unchanged
        weights.
        """
        if self._scratch_model is None:
            size = 2 * sum(weight.elements for weight in self.request.source.weights)
            self.ui.note(f"writing a scratch copy of {size:,} bytes to {self.path.parent}")
            self._scratch_model = self._exit_stack.enter_context(
                open_scratch_model(self.request.source, self.path, self.request.probe_text, self.ui)
            )
            started_at = time.perf_counter()
            self._scratch_model.divergence()
            self._pass_seconds = time.perf_counter() - started_at
        return self._scratch_model


def target_budget(
    source: "Source", build_plan: PlanFunction, size: "SizeRequest", spare_bytes: int = 0
) -> Budget | None:
    """Return the requested size as a budget in bytes; None if the free memory decides the size
    (--fit).

    Raises UserError before anything is measured if no mix has the requested size.
    """
    max_bytes = size.max_bytes(sum(weight.elements for weight in source.weights))
    if max_bytes is None:
        return None
    types = _type_choices(source, build_plan, size.candidate_types)
    budget = Budget(max_bytes, _fixed_bytes(source, build_plan, types, spare_bytes))
    # to check the size alone, let the loss of each type be its negative size
    size_options: dict[str, list[TypeOption]] = {}
    for (name, kind), step in sensitivity.steps_by_type(build_plan, types).items():
        if len(types.get(name, ())) > 1:
            nbytes = sensitivity.padded_bytes(step, source.alignment)
            size_options.setdefault(name, []).append(TypeOption(kind, nbytes, -nbytes))
    if not is_reachable(size_options, budget):
        raise unreachable_error(size_options, budget)
    return budget


def _type_choices(
    source: "Source", build_plan: PlanFunction, types: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Return the types that each tensor may get: those in `types`, or by default those that suit
    its rows and the statistics of its input in the run's own plan.
    """
    choices = sensitivity.type_options(source, types)
    if types:
        return choices
    plan = build_plan({name: kinds[0] for name, kinds in choices.items()})
    return sensitivity.type_options(source, guided=plan.with_importance)


def _fixed_bytes(
    source: "Source", build_plan: PlanFunction, types: Mapping[str, Sequence[str]], spare_bytes: int
) -> int:
    """Return the bytes of the file that do not depend on the choice of types."""
    any_plan = build_plan({name: kinds[0] for name, kinds in types.items()})
    chosen = (step for step in any_plan.steps if len(types.get(step.weight.name, ())) > 1)
    chosen_bytes = sum(sensitivity.padded_bytes(step, source.alignment) for step in chosen)
    return any_plan.nbytes - chosen_bytes + spare_bytes


def _probe_key(request: AllocationRequest) -> dict[str, Any]:
    """Return everything that the divergence of a probe depends on, as a JSON object.

    The source's fingerprint may miss a small edit, so its time stamp is included.
    """
    return {
        "kind": "sensitivity",
        "source": request.source.fingerprint,
        "changed": str(request.source.newest_mtime_ns),
        # how the records are numbered: by the position among all tensors
        "numbered": "all",
        "text": request.text_digest,
        "probe": request.size.probe_unit,
        "n_ctx": PROBE_CHUNK_TOKENS,
        "chunks": request.probe_text.probe_chunks,
        "build": llama_cpp_version(),
    }


def _error_key(request: AllocationRequest, types: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return everything that the errors of the types and the divergences of mixes depend on, as a
    JSON object.
    """
    kinds = _hash_json({name: list(kinds) for name, kinds in types.items()})
    return _probe_key(request) | {
        "kind": "errors",
        "steered": dict(request.provenance),
        "types": kinds,
        "held_out": request.probe_text.held_out_chunks,
        # an embedding that is also the output head counts for both uses
        "tied": "both",
        # errors include the rounding of the activations, as in llama.cpp
        "inputs": "rounded",
    }


def _open_records(path: Path, head: dict[str, Any]) -> RecordLog:
    """Open the record file if it exists with this head; otherwise create it."""
    records = RecordLog.resume(path)
    if records is not None and records.head == head:
        return records
    if records is not None:
        records.close()
    return RecordLog.create(path, head)


def _hash_json(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:40]
