"""Plans a file with a mix of tensor types. The mix follows from a target size or a plan file. This
module also writes plan files, and prints notes about the mix.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.workflows.quantization.size_request import SizeRequest
from quant.allocation.allocate import SIZE_TOLERANCE
from quant.quantize.plan import Plan, plan_quantization
from quant.recipes import plan_file
from quant.recipes.plan_file import TypeMix, nearest_file_type
from quant.recipes.tensor_types import TypeOverrides

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.ui import UI
    from llmcli.workflows.evaluation.models import EvaluationSide
    from llmcli.workflows.quantization.allocate import AllocationResult
    from llmcli.workflows.quantization.scratch_model import ProbeText
    from quant.evaluation.evaluate import TextChunks
    from quant.source.source import Source

DIGEST_CHARACTERS = 32  # of the sha256 of the text that types are chosen on


@dataclass(frozen=True, slots=True)
class PlanBuilder:
    """Builds the plans of one quantization from a file type and type overrides.

    `provenance`: everything except the types that determines the bytes of the file (method, digests
    of the statistics, folds). `spare_bytes`: bytes of the file that a plan does not include.
    """

    source: "Source"
    build: Callable[[str, TypeOverrides], Plan]
    provenance: Mapping[str, str]
    threads: int
    spare_bytes: int = 0

    def mix_plan(self, types: Mapping[str, str]) -> Plan:
        """Return the plan of a mix. `types`: the type of each tensor, by tensor name."""
        return self.build(self.nominal_type(types), TypeOverrides(mix=types))

    def plain_mix_plan(self, types: Mapping[str, str]) -> Plan:
        """Return the plan of a mix that uses neither the method nor the importance of columns."""
        return plan_quantization(self.source, self.nominal_type(types), TypeOverrides(mix=types))

    def nominal_type(self, types: Mapping[str, str]) -> str:
        """Return the file type whose bits per weight are nearest to those of a mix. The file is
        labeled with it.
        """
        elements = {weight.name: weight.elements for weight in self.source.weights}
        known_types = {name: kind for name, kind in types.items() if name in elements}
        return nearest_file_type(
            known_types or types, elements | dict.fromkeys(types.keys() - elements, 1)
        )


def build_plan(
    size: SizeRequest,
    builder: PlanBuilder,
    file_type: str,
    overrides: TypeOverrides,
    config: "Config",
    ui: "UI",
) -> tuple[Plan, dict[str, Any]]:
    """Return the plan of a file, and the JSON fields of its mix of types. The types are those of
    the file type's recipe, or of the mix that `size` requests. Raises UserError.
    """
    if not size.overrides_recipe:
        plan, json_fields = builder.build(file_type, overrides), dict[str, Any]()
        mix = recipe_mix(plan, builder.provenance)
    elif size.plan is not None:
        mix = plan_file.load_plan_file(size.plan)
        mix.require_match(builder.source.fingerprint, builder.provenance)
        plan, json_fields = (
            builder.mix_plan(mix.types),
            {"plan": str(size.plan), **mix.allocation_record},
        )
    else:
        plan, mix, json_fields = _build_allocated_plan(size, builder, config, ui)
    return plan, json_fields | write_plan_file(size.plan_out, mix, ui)


def validate(
    size: SizeRequest, builder: PlanBuilder, file_type: str, overrides: TypeOverrides
) -> None:
    """Raise the errors of `build_plan` that can be found without measurements."""
    if not size.overrides_recipe:
        builder.build(file_type, overrides)
    elif size.plan is not None:
        mix = plan_file.load_plan_file(size.plan)
        # The statistics are not known yet, so only the source is compared.
        mix.require_match(builder.source.fingerprint, mix.settings)
        builder.mix_plan(mix.types)
    else:
        from llmcli.workflows.quantization import allocate

        allocate.target_budget(builder.source, builder.mix_plan, size, builder.spare_bytes)


def write_plan_file(out: Path | None, mix: TypeMix, ui: "UI") -> dict[str, Any]:
    """Write the plan file if `out` is given. Return its JSON field; empty without a file."""
    from llmcli.atomic_files import write_atomically

    if out is None:
        return {}
    write_atomically(out, mix.to_json())
    ui.note(f"wrote the plan file {out}: --plan {out} makes the same file again")
    return {"plan_out": str(out)}


def recipe_mix(plan: Plan, provenance: Mapping[str, str]) -> TypeMix:
    """Return the types that a recipe chose as a mix. Written to a plan file, the mix can be edited
    and used again.
    """
    from quant.recipes import tensor_types

    source = plan.source
    tensors = [(weight.name, weight.shape, weight.type) for weight in source.weights]
    open_names = {name for name, _, _ in tensor_types.quantizable_tensors(tensors, source.facts)}
    types = {step.weight.name: step.type for step in plan.steps if step.weight.name in open_names}
    return TypeMix(
        source.fingerprint,
        types,
        provenance,
        source.name,
        plan.nbytes,
        {},
        {"type": plan.file_type.name},
    )


def _build_allocated_plan(
    size: SizeRequest, builder: PlanBuilder, config: "Config", ui: "UI"
) -> tuple[Plan, TypeMix, dict[str, Any]]:
    """Choose the types for the requested size. Return the plan, the mix and its JSON fields."""
    from llmcli.workflows.quantization import allocate

    probe_text, text_digest = _probe_text(size, builder.threads, ui)
    request = allocate.AllocationRequest(
        builder.source,
        builder.mix_plan,
        builder.plain_mix_plan,
        size,
        builder.provenance,
        probe_text,
        text_digest,
        builder.spare_bytes,
    )
    result = allocate.allocate(request, config, ui)
    plan, source = builder.mix_plan(result.mix), builder.source
    nbytes = plan.nbytes + builder.spare_bytes
    assert nbytes <= result.budget.max_bytes, (nbytes, result.budget)
    allocation = {
        "target_bytes": result.budget.max_bytes,
        "expected_kld": result.expected_kld,
        "text": text_digest,
        "chunks": probe_text.probe_chunks,
        "held_out_chunks": probe_text.held_out_chunks,
        "probe": size.probe_unit,
        "quick": size.quick,
        "trials": [
            {"role": t.role, "factor": t.factor, "kld": t.kld, "kept": t.is_kept}
            for t in result.trials
        ],
    }
    mix = TypeMix(
        source.fingerprint,
        result.mix,
        builder.provenance,
        source.name,
        plan.nbytes,
        _tensor_records(plan, result),
        allocation,
    )
    _print_notes(nbytes, result, size, ui)
    allocation_json = {
        **allocation,
        "text_file": str(size.text) if size.text else "",
        "elapsed_ms": result.seconds * 1000,
    }
    return plan, mix, {"target_bytes": result.budget.max_bytes, "allocation": allocation_json}


def _probe_text(size: SizeRequest, threads: int, ui: "UI") -> tuple["ProbeText", str]:
    """Return the text on which divergence is measured, and the text's digest."""
    from llmcli.workflows.calibration import texts
    from llmcli.workflows.quantization.scratch_model import ProbeText

    n_held_out = size.n_chunks if size.refinement_trials else 0
    paths = [size.text] if size.text else []

    def read_chunks(side: "EvaluationSide") -> "TextChunks":
        return texts.calibration_chunks(side, paths, size.n_chunks + n_held_out, 0, ui)[0]

    digest = texts.digest_texts(paths)[:DIGEST_CHARACTERS]
    return ProbeText(read_chunks, size.n_chunks, n_held_out, threads), digest


def _tensor_records(plan: Plan, result: "AllocationResult") -> dict[str, dict[str, Any]]:
    """Return the measurements of each tensor that the plan file contains besides the types."""
    nbytes = {step.weight.name: step.nbytes for step in plan.steps}
    tensor_rows: dict[str, dict[str, Any]] = {name: {"bytes": nbytes[name]} for name in result.mix}
    for name, sensitivity in result.sensitivities.items():
        tensor_rows[name] |= {
            "error": sensitivity.errors[result.mix[name]],
            "input_error": sensitivity.inputs[result.mix[name]],
            "expected_kld": sensitivity.loss(result.mix[name]) if sensitivity.kld else None,
            "measured_kld": sensitivity.kld,
            "measured_error": sensitivity.probe_error,
            "spqr_style_sensitivity": {"columns": sensitivity.columns, "rows": sensitivity.rows},
        }
    return tensor_rows


def _print_notes(nbytes: int, result: "AllocationResult", sizing: SizeRequest, ui: "UI") -> None:
    """Print notes about the mix, and a warning if the file is much smaller than its target."""
    shortfall = 1 - nbytes / result.budget.max_bytes
    if shortfall > SIZE_TOLERANCE:
        ui.warn(
            f"the file stays {shortfall:.1%} below its target: it has too few tensors for a closer "
            "mix"
        )
    if sizing.quick:
        ui.note(
            "--quick: types were chosen by the error of the weights alone; "
            "the effect on answers was not measured"
        )
    elif result.expected_kld is not None:
        first_trial = result.trials[0] if result.trials else None
        note = f"expected divergence {result.expected_kld:.5f} (sum over single tensors)"
        if first_trial:
            kept_trials = [trial for trial in result.trials if trial.is_kept]
            note += (
                f"; of the whole mix on {result.positions:,} held-out positions "
                f"{kept_trials[-1].kld:.5f}"
                f", {first_trial.kld:.5f} before keeping {len(kept_trials) - 1} of "
                f"{len(result.trials) - 1} "
                "tried changes"
            )
        ui.note(note)
    if sizing.sensitivity:
        _print_sensitivity(result, ui)


def _print_sensitivity(result: "AllocationResult", ui: "UI") -> None:
    """Print a table of the sensitivity of every tensor, the highest divergence first."""
    columns = ("tensor", "type", "expected KLD", "error", "worst 1% columns", "worst 1% rows")
    order = sorted(
        result.sensitivities.values(),
        key=lambda sensitivity: -sensitivity.loss(result.mix[sensitivity.name]),
    )
    rows = [
        (
            sensitivity.name,
            result.mix[sensitivity.name],
            ""
            if sensitivity.kld is None
            else f"{sensitivity.loss(result.mix[sensitivity.name]):.2e}",
            f"{sensitivity.errors[result.mix[sensitivity.name]]:.2e}",
            f"{sensitivity.columns:.1%}",
            f"{sensitivity.rows:.1%}",
        )
        for sensitivity in order
    ]
    ui.text("SpQR-style sensitivity: the share of a tensor's error in its worst columns and rows")
    ui.table(columns, rows, right=columns[2:])


def default_output(plan: Plan) -> Path:
    """Return the default path of a file with a mix: NAME-X.XXbpw.gguf in the folder of the
    source.
    """
    from llmcli.model_loader import quantize_file

    default_path = quantize_file.default_output_path(plan.source, plan.file_type.name)
    return default_path.with_name(
        default_path.name.replace(
            f"-{plan.file_type.name}.gguf", f"-{plan.bits_per_weight:.2f}bpw.gguf"
        )
    )
