"""Types per tensor, by target size or by plan file: builds the plan, writes the plan file, prints
notes.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.workflows.quantization.size_request import Sizing
from quant.allocation.allocate import CLOSE
from quant.quantize import plan as planning
from quant.quantize.plan import Plan
from quant.recipes import plan_file as plans
from quant.recipes.plan_file import Mix, nominal
from quant.recipes.tensor_types import Wishes

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.ui import UI
    from llmcli.workflows.evaluation.models import Side
    from llmcli.workflows.quantization.allocate import Outcome
    from llmcli.workflows.quantization.scratch_model import Reading
    from quant.evaluation.evaluate import Chunks
    from quant.source.source import Source


@dataclass(frozen=True, slots=True)
class Making:
    """Builds plans for one run, from a file type and type overrides.

    `provenance` records what else determines the bytes (method, digests, folds). `spare_bytes`:
    bytes that the file needs in addition to the plan.
    """

    source: "Source"
    make: Callable[[str, Wishes], Plan]
    steered: Mapping[str, str]
    threads: int
    spare: int = 0

    def of(self, types: Mapping[str, str]) -> Plan:
        """Return the plan of a mix (types by tensor)."""
        return self.make(self.nominal(types), Wishes(mix=types))

    def plain(self, types: Mapping[str, str]) -> Plan:
        """Return the plan of a mix without method and importance."""
        return planning.plan(self.source, self.nominal(types), Wishes(mix=types))

    def nominal(self, types: Mapping[str, str]) -> str:
        """Return the file type that a mix is reported as."""
        elements = {weight.name: weight.elements for weight in self.source.weights}
        known_types = {name: kind for name, kind in types.items() if name in elements}
        return nominal(known_types or types, elements | dict.fromkeys(types.keys() - elements, 1))


def planned(
    sizing: Sizing, making: Making, kind: str, wishes: Wishes, config: "Config", ui: "UI"
) -> tuple[Plan, dict[str, Any]]:
    """Return the plan of the file type or of the requested mix, and its fields for --json.

    Raises UserError.
    """
    if not sizing.any:
        plan, json_fields = making.make(kind, wishes), dict[str, Any]()
        mix = recipes(plan, making.steered)
    elif sizing.plan is not None:
        mix = plans.load(sizing.plan.expanduser())
        mix.check(making.source.fingerprint, making.steered)
        plan, json_fields = making.of(mix.types), {"plan": str(sizing.plan), **mix.chosen_by}
    else:
        plan, mix, json_fields = _build_allocated_plan(sizing, making, config, ui)
    return plan, json_fields | keep(sizing.plan_out, mix, ui)


def rehearse(sizing: Sizing, making: Making, kind: str, wishes: Wishes) -> None:
    """Raise what build_plan would raise, as far as that is possible without measurements."""
    if not sizing.any:
        making.make(kind, wishes)
    elif sizing.plan is not None:
        mix = plans.load(sizing.plan.expanduser())
        mix.check(making.source.fingerprint, mix.steered)  # the statistics are not known yet
        making.of(mix.types)
    else:
        from llmcli.workflows.quantization import allocate

        allocate.reachable(making.source, making.of, sizing, making.spare)


def keep(out: Path | None, mix: Mix, ui: "UI") -> dict[str, Any]:
    """Write the plan file, if requested; return its field for --json."""
    from llmcli.atomic_files import write_whole

    if out is None:
        return {}
    write_whole(out.expanduser(), mix.document())
    ui.note(f"wrote the plan file {out}: --plan {out} makes the same file again")
    return {"plan_out": str(out)}


def recipes(plan: Plan, steered: Mapping[str, str]) -> Mix:
    """Return a recipe's types as a mix, which can be edited and used as a plan file."""
    from quant.recipes import tensor_types

    source = plan.source
    present = [(weight.name, weight.shape, weight.type) for weight in source.weights]
    open_names = {name for name, _, _ in tensor_types.open_tensors(present, source.facts)}
    types = {step.weight.name: step.type for step in plan.steps if step.weight.name in open_names}
    return Mix(
        source.fingerprint,
        types,
        steered,
        source.name,
        plan.nbytes,
        {},
        {"type": plan.file_type.name},
    )


def _build_allocated_plan(
    sizing: Sizing, making: Making, config: "Config", ui: "UI"
) -> tuple[Plan, Mix, dict[str, Any]]:
    from llmcli.workflows.quantization import allocate

    reading, text = _probe_text(sizing, making.threads, ui)
    wish = allocate.Wish(
        making.source, making.of, making.plain, sizing, making.steered, reading, text, making.spare
    )
    result = allocate.run(wish, config, ui)
    plan, source = making.of(result.mix), making.source
    nbytes = plan.nbytes + making.spare
    assert nbytes <= result.budget.most, (nbytes, result.budget)
    allocation = {
        "target_bytes": result.budget.most,
        "expected_kld": result.expected,
        "text": text,
        "chunks": reading.measured,
        "held_out_chunks": reading.held_out,
        "probe": sizing.unit,
        "quick": sizing.quick,
        "trials": [
            {"role": t.role, "factor": t.factor, "kld": t.kld, "kept": t.kept}
            for t in result.trials
        ],
    }
    mix = Mix(
        source.fingerprint,
        result.mix,
        making.steered,
        source.name,
        plan.nbytes,
        _tensor_records(plan, result),
        allocation,
    )
    _print_notes(nbytes, result, sizing, ui)
    allocation_json = {**allocation, "elapsed_ms": result.seconds * 1000}
    return plan, mix, {"target_bytes": result.budget.most, "allocation": allocation_json}


def _probe_text(sizing: Sizing, threads: int, ui: "UI") -> tuple["Reading", str]:
    """Return the text that divergence is measured on, and its digest."""
    from llmcli.workflows.calibration import texts
    from llmcli.workflows.quantization.scratch_model import Reading

    n_held_out = sizing.chunks if sizing.tries else 0
    paths = [sizing.text] if sizing.text else []
    content = (
        b"".join(text.words.encode() for text in texts.given(paths)) if paths else texts.digest()
    )

    def text(side: "Side") -> "Chunks":
        return texts.chunks(side, paths, sizing.chunks + n_held_out, 0, ui)[0]

    return Reading(text, sizing.chunks, n_held_out, threads), hashlib.sha256(content).hexdigest()[
        :32
    ]


def _tensor_records(plan: Plan, outcome: "Outcome") -> dict[str, dict[str, Any]]:
    """Return what the plan file records of each tensor besides its type."""
    nbytes = {step.weight.name: step.nbytes for step in plan.steps}
    tensor_rows: dict[str, dict[str, Any]] = {name: {"bytes": nbytes[name]} for name in outcome.mix}
    for name, sensitivity in outcome.sensed.items():
        tensor_rows[name] |= {
            "error": sensitivity.errors[outcome.mix[name]],
            "input_error": sensitivity.inputs[outcome.mix[name]],
            "expected_kld": sensitivity.loss(outcome.mix[name]) if sensitivity.kld else None,
            "measured_kld": sensitivity.kld,
            "measured_error": sensitivity.shown,
            "spqr_style_sensitivity": {"columns": sensitivity.columns, "rows": sensitivity.rows},
        }
    return tensor_rows


def _print_notes(nbytes: int, outcome: "Outcome", sizing: Sizing, ui: "UI") -> None:
    """Print notes about the mix, and a warning if the file is well below its target."""
    shortfall = 1 - nbytes / outcome.budget.most
    if shortfall > CLOSE:
        ui.warn(
            f"the file stays {shortfall:.1%} below its target: it has too few tensors for a closer "
            "mix"
        )
    if sizing.quick:
        ui.note(
            "--quick: types were chosen by the error of the weights alone; "
            "the effect on answers was not measured"
        )
    elif outcome.expected is not None:
        first_trial = outcome.trials[0] if outcome.trials else None
        note = f"expected divergence {outcome.expected:.5f} (sum over single tensors)"
        if first_trial:
            kept_trials = [trial for trial in outcome.trials if trial.kept]
            note += (
                f"; of the whole mix on {outcome.positions:,} held-out positions "
                f"{kept_trials[-1].kld:.5f}"
                f", {first_trial.kld:.5f} before keeping {len(kept_trials) - 1} of "
                f"{len(outcome.trials) - 1} "
                "tried changes"
            )
        ui.note(note)
    if sizing.sensitivity:
        _print_sensitivity(outcome, ui)


def _print_sensitivity(outcome: "Outcome", ui: "UI") -> None:
    """Print every tensor's sensitivity, the most costly first."""
    columns = ("tensor", "type", "expected KLD", "error", "worst 1% columns", "worst 1% rows")
    order = sorted(outcome.sensed.values(), key=lambda one: -one.loss(outcome.mix[one.name]))
    rows = [
        (
            sensitivity.name,
            outcome.mix[sensitivity.name],
            ""
            if sensitivity.kld is None
            else f"{sensitivity.loss(outcome.mix[sensitivity.name]):.2e}",
            f"{sensitivity.errors[outcome.mix[sensitivity.name]]:.2e}",
            f"{sensitivity.columns:.1%}",
            f"{sensitivity.rows:.1%}",
        )
        for sensitivity in order
    ]
    ui.text("SpQR-style sensitivity: the share of a tensor's error in its worst columns and rows")
    ui.table(columns, rows, right=columns[2:])


def beside(plan: Plan) -> Path:
    """Return NAME-X.XXbpw.gguf in the source's folder."""
    from llmcli.model_loader import quantize_file

    default_path = quantize_file.beside(plan)
    return default_path.with_name(
        default_path.name.replace(
            f"-{plan.file_type.name}.gguf", f"-{plan.bits_per_weight:.2f}bpw.gguf"
        )
    )
