"""`quantize` by size or by plan file: which type each tensor gets, kept as a plan file, and told."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.commands.sizing import Sizing
from quant import mix as plans
from quant import planning
from quant.allocate import CLOSE
from quant.mix import Mix, nominal
from quant.planning import Plan
from quant.recipe import Wishes

if TYPE_CHECKING:
    from llmcli.commands.allocating import Outcome
    from llmcli.commands.scorers import Side
    from llmcli.commands.stage import Reading
    from llmcli.config import Config
    from llmcli.ui import UI
    from quant.evaluate import Chunks
    from quant.source import Source


@dataclass(frozen=True, slots=True)
class Making:
    """How a plan is made of a file type and wishes, all else as the run has it; `steered` is that
    as words. `spare` are bytes that the file will have beside those of the plan.
    """

    source: "Source"
    make: Callable[[str, Wishes], Plan]
    steered: Mapping[str, str]
    threads: int
    spare: int = 0

    def of(self, types: Mapping[str, str]) -> Plan:
        """The plan of a mix."""
        return self.make(self.nominal(types), Wishes(mix=types))

    def plain(self, types: Mapping[str, str]) -> Plan:
        """The plan of a mix without method and importance."""
        return planning.plan(self.source, self.nominal(types), Wishes(mix=types))

    def nominal(self, types: Mapping[str, str]) -> str:
        """The file type that a mix is told as."""
        elements = {weight.name: weight.elements for weight in self.source.weights}
        known = {name: kind for name, kind in types.items() if name in elements}
        return nominal(known or types, elements | dict.fromkeys(types.keys() - elements, 1))


def planned(
    sizing: Sizing, making: Making, kind: str, wishes: Wishes, config: "Config", ui: "UI"
) -> tuple[Plan, dict[str, Any]]:
    """The plan of a file type and wishes, or of the mix that was asked for, and what --json says of
    that.
    """
    if not sizing.any:
        plan, told = making.make(kind, wishes), dict[str, Any]()
        mix = recipes(plan, making.steered)
    elif sizing.plan is not None:
        mix = plans.load(sizing.plan.expanduser())
        mix.check(making.source.fingerprint, making.steered)
        plan, told = making.of(mix.types), {"plan": str(sizing.plan), **mix.chosen_by}
    else:
        plan, mix, told = _allocated(sizing, making, config, ui)
    return plan, told | keep(sizing.plan_out, mix, ui)


def rehearse(sizing: Sizing, making: Making, kind: str, wishes: Wishes) -> None:
    """Raise what planned() would, as far as nothing has to be measured or gathered for it."""
    if not sizing.any:
        making.make(kind, wishes)
    elif sizing.plan is not None:
        mix = plans.load(sizing.plan.expanduser())
        mix.check(making.source.fingerprint, mix.steered)  # by what it was steered is not known yet
        making.of(mix.types)
    else:
        from llmcli.commands import allocating

        allocating.reachable(making.source, making.of, sizing, making.spare)


def keep(out: Path | None, mix: Mix, ui: "UI") -> dict[str, Any]:
    """Write the plan file that was asked for."""
    from llmcli.catalog.partial import write_whole

    if out is None:
        return {}
    write_whole(out.expanduser(), mix.document())
    ui.note(f"the plan is in {out}: --plan {out} makes the same file again")
    return {"plan_out": str(out)}


def recipes(plan: Plan, steered: Mapping[str, str]) -> Mix:
    """A recipe's own mix as a plan: a file to begin one's own with."""
    from quant import recipe

    source = plan.source
    present = [(weight.name, weight.shape, weight.type) for weight in source.weights]
    open_names = {name for name, _, _ in recipe.open_tensors(present, source.facts)}
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


def _allocated(
    sizing: Sizing, making: Making, config: "Config", ui: "UI"
) -> tuple[Plan, Mix, dict[str, Any]]:
    from llmcli.commands import allocating

    reading, text = _reading(sizing, making.threads, ui)
    wish = allocating.Wish(
        making.source, making.of, making.plain, sizing, making.steered, reading, text, making.spare
    )
    outcome = allocating.run(wish, config, ui)
    plan, source = making.of(outcome.mix), making.source
    nbytes = plan.nbytes + making.spare
    assert nbytes <= outcome.budget.most, (nbytes, outcome.budget)
    made = {
        "target_bytes": outcome.budget.most,
        "expected_kld": outcome.expected,
        "text": text,
        "chunks": reading.measured,
        "held_out_chunks": reading.held_out,
        "probe": sizing.unit,
        "quick": sizing.quick,
        "trials": [
            {"role": t.role, "factor": t.factor, "kld": t.kld, "kept": t.kept}
            for t in outcome.trials
        ],
    }
    mix = Mix(
        source.fingerprint,
        outcome.mix,
        making.steered,
        source.name,
        plan.nbytes,
        _rows(plan, outcome),
        made,
    )
    _tell(nbytes, outcome, sizing, ui)
    told = {**made, "elapsed_ms": outcome.seconds * 1000}
    return plan, mix, {"target_bytes": outcome.budget.most, "allocation": told}


def _reading(sizing: Sizing, threads: int, ui: "UI") -> tuple["Reading", str]:
    """What divergence is measured on, and its digest."""
    from llmcli.commands import texts
    from llmcli.commands.stage import Reading

    held = sizing.chunks if sizing.tries else 0
    paths = [sizing.text] if sizing.text else []
    words = (
        b"".join(text.words.encode() for text in texts.given(paths)) if paths else texts.digest()
    )

    def text(side: "Side") -> "Chunks":
        return texts.chunks(side, paths, sizing.chunks + held, 0, ui)[0]

    return Reading(text, sizing.chunks, held, threads), hashlib.sha256(words).hexdigest()[:32]


def _rows(plan: Plan, outcome: "Outcome") -> dict[str, dict[str, Any]]:
    """What the plan file tells of each tensor beside its type."""
    nbytes = {step.weight.name: step.nbytes for step in plan.steps}
    found: dict[str, dict[str, Any]] = {name: {"bytes": nbytes[name]} for name in outcome.mix}
    for name, one in outcome.sensed.items():
        found[name] |= {
            "error": one.errors[outcome.mix[name]],
            "input_error": one.inputs[outcome.mix[name]],
            "expected_kld": one.loss(outcome.mix[name]) if one.kld else None,
            "measured_kld": one.kld,
            "measured_error": one.shown,
            "spqr_style_sensitivity": {"columns": one.columns, "rows": one.rows},
        }
    return found


def _tell(nbytes: int, outcome: "Outcome", sizing: Sizing, ui: "UI") -> None:
    """The mix in a few lines; a file well below its target is said to be."""
    short = 1 - nbytes / outcome.budget.most
    if short > CLOSE:
        ui.warn(
            f"the file stays {short:.1%} below its target: the tensors are too few for a nearer mix"
        )
    if sizing.quick:
        ui.note(
            "--quick: chosen by the error of the weights alone; what that does to answers is not measured"
        )
    elif outcome.expected is not None:
        first = outcome.trials[0] if outcome.trials else None
        told = f"divergence expected {outcome.expected:.5f} (one tensor at a time, added up)"
        if first:
            kept = [trial for trial in outcome.trials if trial.kept]
            told += (
                f"; of the whole mix on {outcome.positions:,} held-out positions {kept[-1].kld:.5f}"
            )
            told += f", {first.kld:.5f} before {len(kept) - 1} changes were kept of {len(outcome.trials) - 1} tried"
        ui.note(told)
    if sizing.sensitivity:
        _table(outcome, ui)


def _table(outcome: "Outcome", ui: "UI") -> None:
    """Every tensor's sensitivity, those that cost most first."""
    columns = ("tensor", "type", "expected KLD", "error", "worst 1% columns", "worst 1% rows")
    order = sorted(outcome.sensed.values(), key=lambda one: -one.loss(outcome.mix[one.name]))
    rows = [
        (
            one.name,
            outcome.mix[one.name],
            "" if one.kld is None else f"{one.loss(outcome.mix[one.name]):.2e}",
            f"{one.errors[outcome.mix[one.name]]:.2e}",
            f"{one.columns:.1%}",
            f"{one.rows:.1%}",
        )
        for one in order
    ]
    ui.text(
        "SpQR-style sensitivity: the share of a tensor's error that its worst columns and rows bring"
    )
    ui.table(columns, rows, right=columns[2:])


def beside(plan: Plan) -> Path:
    """NAME-X.XXbpw.gguf beside the source."""
    from llmcli.commands import weights

    stock = weights.beside(plan)
    return stock.with_name(
        stock.name.replace(f"-{plan.file_type.name}.gguf", f"-{plan.bits_per_weight:.2f}bpw.gguf")
    )
