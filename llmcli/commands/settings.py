"""The settings that `llmcli pareto` sets beside one another: a plan for each type or size, method
and fold.

What they need to have measured is gathered where it is not given; sizes are allocated and folds
chosen here, before anything is made. It knows plans, and nothing of what becomes of them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmcli.commands import allocating, bases, folding, gathering, mixes
from llmcli.commands.pareto import TYPES, Settings
from llmcli.commands.quantize import Known
from llmcli.commands.sizing import Sizing
from llmcli.errors import UsageError
from quant import imatrix, moments, planning, recipe
from quant.folds import choose, rewrite
from quant.imatrix import Imatrix
from quant.moments import Moments
from quant.recipe import STOCK, Wishes

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.ui import UI
    from quant.planning import Plan
    from quant.source import Source

Measured = tuple[Imatrix | None, Moments | None]


def plans_of(
    source: "Source", settings: Settings, threads: int, config: "Config", ui: "UI"
) -> dict[str, "Plan"]:
    """A plan for each setting, by its name; all that cannot be made is refused here."""
    bases.check(source)
    sizes = _words(settings.target_size)
    types = [
        recipe.parse(one).name
        for one in _words(TYPES if settings.types is None and not sizes else settings.types)
    ]
    methods = [planning.named(one).name for one in _words(settings.methods)]
    folds = list(dict.fromkeys(settings.fold or ["none"]))
    for size in sizes:
        Sizing(target_size=size).check(split=False, typed=False, wished=False)
    if not (types or sizes) or not methods:
        raise UsageError("there is no setting", hint=f"--types {TYPES} --methods ggml")
    plain = _making(source, "ggml", "none", (None, None), threads)
    for size in sizes:  # all of them before minutes of measuring for the first
        allocating.reachable(source, plain.of, Sizing(target_size=size))
    measured = _measured(source, settings, (methods, folds), threads, config, ui)
    made = {}
    for fold in folds:
        for method in methods:
            making = _making(source, method, fold, measured, threads)
            for kind in [*types, *sizes]:
                sizing = Sizing(target_size=kind) if kind in sizes else Sizing()
                plan, _ = mixes.planned(sizing, making, kind, STOCK, config, ui)
                told = [
                    kind,
                    *([method] if len(methods) > 1 else []),
                    *([f"fold {fold}"] if len(folds) > 1 else []),
                ]
                made[" ".join(told)] = folding.folded(plan, fold, threads, ui)
    return made


def _words(text: str | None) -> list[str]:
    return list(dict.fromkeys(word for part in (text or "").split(",") if (word := part.strip())))


def _measured(
    source: "Source",
    settings: Settings,
    wanted: tuple[Sequence[str], Sequence[str]],
    threads: int,
    config: "Config",
    ui: "UI",
) -> Measured:
    """What was given, and what `wanted` methods and folds need beside it."""
    methods, folds = wanted
    sums = imatrix.load(settings.imatrix.expanduser()) if settings.imatrix else None
    second = moments.load(settings.moments.expanduser()) if settings.moments else None
    folded = next((fold for fold in folds if choose.parse(fold)), None)
    needing = next((name for name in methods if planning.named(name).needs == "moments"), None)
    if needing and second is None:
        return gathering.gathered(
            gathering.Wish(source, f"method {needing}", True, threads), sums, config, ui
        )
    if folded and sums is None and second is None:
        return gathering.gathered(
            gathering.Wish(source, f"--fold {folded}", False, threads), sums, config, ui
        )
    return sums, second


def _making(
    source: "Source", method: str, fold: str, measured: Measured, threads: int
) -> mixes.Making:
    """How plans of a method are made; `steered` as in quantize, so that both find what the other
    has measured.
    """
    known, folds = Known(*measured, None), bool(choose.parse(fold))
    steered = {"method": method, "fold": fold * folds, **known.digests}

    def make(kind: str, wishes: Wishes) -> "Plan":
        return planning.plan(source, kind, wishes, method=method, **known.given)

    return mixes.Making(source, make, steered, threads, rewrite.ROOM * folds)
