"""`llmcli bench tune`: parse, search for the fastest settings, keep them, say what came of it."""

import math
from datetime import date
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli.commands.grouped import grouped
from llmcli.commands.reporting import Charts, Report
from llmcli.commands.show import Json, start
from llmcli.commands.workers import Workers
from llmcli.errors import UsageError, UserError
from llmcli.units import several

if TYPE_CHECKING:
    from pathlib import Path

    from llmcli.bench.tune import Found, Setting, Space
    from llmcli.catalog.fetch import Model
    from llmcli.config import Config
    from llmcli.hardware.profile import Profile
    from llmcli.ui import UI
    from quant.container import Header

Budget = Annotated[
    float, typer.Option("--budget", metavar="SECONDS", help="How long it may measure.")
]
For = Annotated[
    str,
    typer.Option(
        "--for",
        metavar="WHAT",
        help="What is to be fast: chat (512 tokens of prompt, 128 of answer), prompts or answers.",
    ),
]
Kinds = Annotated[
    str | None,
    typer.Option(
        "--kv", metavar="TYPES", help="Try these KV cache types too (q8_0): they change the text."
    ),
]
Show = Annotated[bool, typer.Option("--show", help="List the profiles that are kept.")]
Forget = Annotated[
    str | None, typer.Option("--forget", metavar="REF", help="Delete the profile of a model.")
]
DIFFERS = {"threads": "threads", "ubatch": "ubatch_size", "flash": "flash_attn"}


def tune(
    ref: Annotated[
        str | None, typer.Argument(metavar="REF", help="catalog name, org/repo[:QUANT], file")
    ] = None,
    budget: Budget = 120.0,
    objective: For = "chat",
    kv: Kinds = None,
    show: Show = False,
    forget: Forget = None,
    report_file: Report = None,
    chart: Charts = None,
    offline: Annotated[bool, typer.Option("--offline", help="Make no connection.")] = False,
    json: Json = False,
    *,
    workers: Workers,
) -> None:
    """Find the settings that are fastest for a model on this machine; chat and run use them from
    then on.

    Tries threads, micro-batches and flash attention, and compares the best with the defaults, in
    pairs. What is as fast as the defaults stays at the defaults.
    """
    from llmcli.bench.tune import OBJECTIVES
    from llmcli.commands import reporting

    config, ui = start(json, offline)
    if objective not in OBJECTIVES:
        raise UsageError(
            f"--for does not know {objective!r}", hint=f"--for takes: {' '.join(OBJECTIVES)}"
        )
    if not 0 < budget < math.inf:
        raise UserError(f"--budget is {budget:g}", hint="--budget takes seconds: --budget 120")
    if sum((ref is not None, show, forget is not None)) != 1:
        raise UsageError(
            "give a model, --show or --forget REF", hint="llmcli bench tune smollm2:135m"
        )
    if show:
        _show(config, ui)
    elif forget is not None:
        _forget(forget, config, ui)
    elif ref is not None:
        reporting.check(report_file)
        workers.join(ui)
        _tune(ref, budget, objective, kv, (report_file, chart), config, ui)


def _tune(
    ref: str,
    budget: float,
    objective: str,
    kinds: str | None,
    how: "tuple[Path | None, bool | None]",
    config: "Config",
    ui: "UI",
) -> None:
    from llmcli.bench.tune import Setting
    from llmcli.commands import reporting, tune_page
    from llmcli.commands.ready import ready
    from llmcli.hardware import cluster, fit, profile
    from llmcli.runtime import identity
    from llmcli.runtime.request import RunOptions
    from quant import container

    model = ready(ref, None, config, ui)
    header = container.read(model.path)
    container.check(header)
    options, layers = fit.decide(header, RunOptions(), ui.warn)
    options = fit.attention(header, options, layers, config, fit.branches(header, options))
    assert options.threads, options
    default = Setting(options.threads, options.threads, flash=options.flash_attn)
    space = _space(header, kinds, default.flash)
    before = profile.find(header, config, ui.warn)
    try:
        found = _search(header, layers, default, space, objective, budget, ui)
    except KeyboardInterrupt:
        ui.note("stopped: no profile was written, and one from before stays")
        raise
    world = identity.content(header), cluster.identity(), profile.build()
    made = _profile(model, world, objective, found)
    path = profile.save(made, config)
    if ui.json:
        ui.result(
            {
                **_document(model, made, found, budget),
                "path": str(path),
                "before": _before(before, made),
            }
        )
    else:
        _tell(model, made, found, ui)
        if before and before.objective == objective:
            agrees = "agrees" if _agree(before, made) else "does not agree"
            flags = profile.words(before.settings) or "the defaults"
            ui.text(f"{agrees} with the one of {before.date}: {flags}, {_ratio(before)}")
        ui.text(
            f"kept in {path}: chat and run use it (--no-profile leaves it)"
            if made.settings
            else f"kept in {path}"
        )
    verdict = _verdict(model, made, found)
    reporting.show(
        lambda: tune_page.made(model.name, verdict, found),
        lambda: tune_page.charts(found)[:1],
        how,
        ui,
    )


def _search(
    header: "Header",
    layers: int,
    default: "Setting",
    space: "Space",
    objective: str,
    budget: float,
    ui: "UI",
) -> "Found":
    from llmcli.bench import trial, tune
    from llmcli.runtime.binding.model import open_model

    longest = sum(tune.OBJECTIVES[objective])
    opened = open_model(header.path, gpu_layers=layers, latent=header.latent)
    with ui.bar(f"tune {header.path.name}", None, "tests") as bar, opened as model:
        with trial.OnModel(model, longest) as measured:
            return tune.find(
                measured, space, default, objective, budget, tick=lambda: bar.advance(1)
            )


def _space(header: "Header", kinds: str | None, usual: str) -> "Space":
    """What is tried: the cache types that were asked for, where model and flash attention take
    them. Where flash attention is `usual`ly off, it must be said to be on.
    """
    from llmcli.bench import grid, sweep, tune
    from llmcli.hardware import host
    from llmcli.runtime import kv
    from llmcli.runtime.binding.cache_types import KV_TYPES, check_cache

    modes = []
    for kind in dict.fromkeys(
        ["f16", *(grid.words("--kv", [kinds], list(KV_TYPES)) if kinds else [])]
    ):
        kv.check(header.metadata, kind, kind)
        for flash in ("on" if usual == "off" else "auto", "off"):
            try:
                check_cache(kind, kind, flash)
            except UserError:
                continue
            modes.append((flash, kind))
    return tune.Space(tune.threads(host.cores(), host.cpus()), sweep.UBATCHES, modes)


def _settings(found: "Found") -> dict[str, Any]:
    """What differs from the defaults, by the names of the run options; -tb is as -t unless it is
    said.
    """
    best, default = found.setting, found.default
    changed: dict[str, Any] = {
        option: getattr(best, name)
        for name, option in DIFFERS.items()
        if getattr(best, name) != getattr(default, name)
    }
    if best.threads_batch != best.threads:
        changed["threads_batch"] = best.threads_batch
    if best.cache != default.cache:
        changed["cache_type_k"] = changed["cache_type_v"] = best.cache
    return changed


def _profile(
    model: "Model", world: tuple[str, str, str], objective: str, found: "Found"
) -> "Profile":
    from llmcli.hardware.profile import Profile

    told = found.comparison
    speeds = (1.0, 1.0, 1.0) if told is None else (told.ratio, told.low, min(told.high, 1e9))
    return Profile(
        model.name, *world, objective, _settings(found), *speeds, date.today().isoformat()
    )


def _agree(one: "Profile", other: "Profile") -> bool:
    """Whether the same was found, or what was found may be as fast: the intervals overlap."""
    return one.settings == other.settings or max(one.low, other.low) <= min(one.high, other.high)


def _before(before: "Profile | None", made: "Profile") -> dict[str, Any] | None:
    if before is None or before.objective != made.objective:
        return None
    speeds = {"ratio": before.ratio, "low": before.low, "high": before.high}
    return {
        "date": before.date,
        "settings": dict(before.settings),
        **speeds,
        "agrees": _agree(before, made),
    }


def _document(model: "Model", made: "Profile", found: "Found", budget: float) -> dict[str, Any]:
    from dataclasses import asdict

    from llmcli.hardware import profile

    told = found.comparison
    return {
        "model": {"name": model.name, "path": str(model.path)},
        "machine": made.machine,
        "build": made.build,
        "for": made.objective,
        "measured_tokens": dict(zip(("prompt", "generated"), found.work.tokens, strict=True)),
        "budget_seconds": budget,
        "spent_seconds": found.seconds,
        "defaults": asdict(found.default),
        "best": asdict(found.best),
        "faster": found.faster,
        "settings": dict(made.settings),
        "flags": profile.words(made.settings),
        "comparison": None
        if told is None
        else {
            "ratio": told.ratio,
            "low": told.low,
            "high": None if math.isinf(told.high) else told.high,
            "confidence": told.confidence,
            "noisy": told.noisy,
            "defaults_per_second": told.a,
            "best_per_second": told.b,
        },
        "tried": [{**asdict(one), "setting": asdict(one.setting)} for one in found.tried],
    }


def _tell(model: "Model", made: "Profile", found: "Found", ui: "UI") -> None:
    from llmcli.commands.tune_page import NAMES, value

    rows = [
        (
            NAMES.get(one.option, one.option),
            value(one),
            f"{one.ratio:.3f}",
            str(one.rounds),
            "taken" if one.taken else "",
        )
        for one in found.tried
    ]
    columns = ("option", "value", "speed", "rounds", "")
    ui.table(columns, rows, right=("speed", "rounds"))
    ui.text()
    ui.text(_verdict(model, made, found))
    told = found.comparison
    if told is not None and told.noisy:
        ui.warn(
            "something else uses this machine: speeds were far apart; on a quiet one another setting may be best"
        )


def _verdict(model: "Model", made: "Profile", found: "Found") -> str:
    """What came of it, in a line."""
    from llmcli.hardware import profile

    prompt, generated = found.work.wanted
    meant = " and ".join(
        [f"{prompt} prompt tokens"] * bool(prompt) + [f"{generated} generated"] * bool(generated)
    )
    told, name = found.comparison, f"{model.name} for {made.objective} ({meant})"
    if told is None:
        return f"{name}: nothing that was tried is worth a change from the defaults"
    if found.faster:
        flags = profile.words(made.settings)
        return f"{name}: {flags} is {_ratio(made)} the defaults' speed ({told.confidence:.0%}, {len(told.a)} pairs)"
    return (
        f"{name}: the defaults are as fast as what looked best: {_ratio(made)}, {len(told.a)} pairs"
    )


def _ratio(one: "Profile") -> str:
    return f"{one.ratio:.3f}x ({one.low:.3f} to {one.high:.3f})"


def _show(config: "Config", ui: "UI") -> None:
    from dataclasses import asdict

    from llmcli.hardware import profile

    found = profile.kept(config, ui.warn)
    if ui.json:
        ui.result(
            [
                {**asdict(one), "flags": profile.words(one.settings), "here": one.here}
                for one in found
            ]
        )
        return
    if not found:
        ui.text("no profile is kept: llmcli bench tune REF finds one")
        return
    rows = [
        (
            one.model,
            profile.words(one.settings) or "the defaults",
            one.objective,
            _ratio(one),
            one.date,
            "this one" if one.here else "another",
        )
        for one in found
    ]
    ui.table(("model", "flags", "for", "of the defaults' speed", "date", "machine and build"), rows)


def _forget(ref: str, config: "Config", ui: "UI") -> None:
    from llmcli.catalog import fetch
    from llmcli.commands.show import present
    from llmcli.hardware import profile
    from quant import container

    wanted = fetch.resolve(ref, config)
    model = present(wanted, config, ui, ref)
    header = container.read(model.path) if model and model.kind == "gguf" else None
    gone = profile.forget(config, wanted.ref.full, header)
    if ui.json:
        ui.result({"forgotten": [str(path) for path in gone]})
    else:
        ui.text(f"{several(len(gone), 'profile')} of {wanted.ref.full} forgotten")


BENCHES = (grouped(tune),)
