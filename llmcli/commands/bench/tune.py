"""`llmcli bench tune`: searches for the fastest settings of a model, saves them, prints the
result.
"""

import math
from datetime import date
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli.commands.command_context import start
from llmcli.commands.options.arguments import Json
from llmcli.commands.options.groups import grouped
from llmcli.commands.options.report import Charts, Report
from llmcli.errors import UsageError, UserError
from llmcli.model_loader.rpc_workers import Workers
from llmcli.units import several

if TYPE_CHECKING:
    from pathlib import Path

    from llmcli.bench.tune.tune import Found, Setting, Space
    from llmcli.catalog.fetch import Model
    from llmcli.config import Config
    from llmcli.planning.tuned_profile import Profile
    from llmcli.ui import UI
    from quant.model_file.model_header import Header

Budget = Annotated[
    float, typer.Option("--budget", metavar="SECONDS", help="Longest measuring time.")
]
For = Annotated[
    str,
    typer.Option(
        "--for",
        metavar="WHAT",
        help="What to optimize: chat (512 prompt tokens, 128 generated), prompts or answers.",
    ),
]
Kinds = Annotated[
    str | None,
    typer.Option(
        "--kv", metavar="TYPES", help="Also try these KV cache types (q8_0), which change the text."
    ),
]
Show = Annotated[bool, typer.Option("--show", help="List the saved profiles.")]
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
    offline: Annotated[bool, typer.Option("--offline", help="Make no network connection.")] = False,
    json: Json = False,
    *,
    workers: Workers,
) -> None:
    """Find the fastest settings of a model on this machine, and save them for chat and run.

    Tries threads, micro-batches and flash attention, and compares the best settings with the
    defaults in pairs. A default is kept unless another value is faster.
    """
    from llmcli.bench.tune.tune import OBJECTIVES
    from llmcli.commands.options import report

    config, ui = start(json, offline)
    if objective not in OBJECTIVES:
        raise UsageError(
            f"--for {objective!r} is unknown", hint=f"--for takes: {' '.join(OBJECTIVES)}"
        )
    if not 0 < budget < math.inf:
        raise UserError(f"--budget is {budget:g}", hint="--budget takes seconds: --budget 120")
    if sum((ref is not None, show, forget is not None)) != 1:
        raise UsageError(
            "give a model, --show or --forget REF", hint="llmcli bench tune smollm2:135m"
        )
    if show:
        _list_profiles(config, ui)
    elif forget is not None:
        _forget(forget, config, ui)
    elif ref is not None:
        report.check(report_file)
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
    from llmcli.bench.tune.tune import Setting
    from llmcli.commands.bench import tune_page
    from llmcli.commands.options import report
    from llmcli.hardware import rpc_workers
    from llmcli.model_loader.prepare import ready
    from llmcli.planning import resolve_options, tuned_profile
    from llmcli.runtime import model_identity
    from llmcli.runtime.requests.request import RunOptions
    from quant.model_file import load_checks, read_header

    model = ready(ref, None, config, ui)
    header = read_header.read(model.path)
    load_checks.check(header)
    options, layers = resolve_options.decide(header, RunOptions(), ui.warn)
    options = resolve_options.attention(
        header, options, layers, config, resolve_options.branches(header, options)
    )
    assert options.threads, options
    default = Setting(options.threads, options.threads, flash=options.flash_attn)
    space = _build_space(header, kinds, default.flash)
    previous = tuned_profile.find(header, config, ui.warn)
    try:
        result = _search(header, layers, default, space, objective, budget, ui)
    except KeyboardInterrupt:
        ui.note("stopped: no profile was written; an earlier one is kept")
        raise
    machine_and_build = (
        model_identity.content(header),
        rpc_workers.identity(),
        tuned_profile.build(),
    )
    saved = _build_profile(model, machine_and_build, objective, result)
    path = tuned_profile.save(saved, config)
    if ui.json:
        ui.result(
            {
                **_build_document(model, saved, result, budget),
                "path": str(path),
                "before": _previous_document(previous, saved),
            }
        )
    else:
        _print_result(model, saved, result, ui)
        if previous and previous.objective == objective:
            agrees = "agrees" if _agrees(previous, saved) else "does not agree"
            flags = tuned_profile.words(previous.settings) or "the defaults"
            ui.text(
                f"{agrees} with the profile of {previous.date}: {flags}, {_format_ratio(previous)}"
            )
        ui.text(
            f"saved in {path}: chat and run use it (--no-profile ignores it)"
            if saved.settings
            else f"saved in {path}"
        )
    verdict = _verdict(model, saved, result)
    report.show(
        lambda: tune_page.made(model.name, verdict, result),
        lambda: tune_page.charts(result)[:1],
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
    from llmcli.bench.tune import model_trial, tune
    from llmcli.runtime.binding.model import open_model

    longest = sum(tune.OBJECTIVES[objective])
    opened = open_model(header.path, gpu_layers=layers, latent=header.latent)
    with ui.bar(f"tune {header.path.name}", None, "tests") as bar, opened as model:
        with model_trial.OnModel(model, longest) as measured:
            return tune.find(
                measured, space, default, objective, budget, tick=lambda: bar.advance(1)
            )


def _build_space(header: "Header", kinds: str | None, usual: str) -> "Space":
    """Return the values to try: of the requested cache types, those that the model and flash
    attention support.

    `default_flash`: the default of flash attention; if it is "off", "on" must be explicit.
    """
    from llmcli.bench.speed import parameter_grid, sweep
    from llmcli.bench.tune import tune
    from llmcli.hardware import host
    from llmcli.runtime import kv_size
    from llmcli.runtime.binding.cache_types import KV_TYPES, check_cache

    modes = []
    for kind in dict.fromkeys(
        ["f16", *(parameter_grid.words("--kv", [kinds], list(KV_TYPES)) if kinds else [])]
    ):
        kv_size.check(header.metadata, kind, kind)
        for flash in ("on" if usual == "off" else "auto", "off"):
            try:
                check_cache(kind, kind, flash)
            except UserError:
                continue
            modes.append((flash, kind))
    return tune.Space(tune.threads(host.cores(), host.cpus()), sweep.UBATCHES, modes)


def _changed_options(found: "Found") -> dict[str, Any]:
    """Return the run options that differ from the defaults; -tb only if it differs from -t."""
    best_setting, default = found.setting, found.default
    changed: dict[str, Any] = {
        option: getattr(best_setting, name)
        for name, option in DIFFERS.items()
        if getattr(best_setting, name) != getattr(default, name)
    }
    if best_setting.threads_batch != best_setting.threads:
        changed["threads_batch"] = best_setting.threads_batch
    if best_setting.cache != default.cache:
        changed["cache_type_k"] = changed["cache_type_v"] = best_setting.cache
    return changed


def _build_profile(
    model: "Model", world: tuple[str, str, str], objective: str, found: "Found"
) -> "Profile":
    from llmcli.planning.tuned_profile import Profile

    comparison = found.comparison
    speeds = (
        (1.0, 1.0, 1.0)
        if comparison is None
        else (comparison.ratio, comparison.low, min(comparison.high, 1e9))
    )
    return Profile(
        model.name, *world, objective, _changed_options(found), *speeds, date.today().isoformat()
    )


def _agrees(one: "Profile", other: "Profile") -> bool:
    """Return whether two profiles have the same settings, or overlapping intervals of speed."""
    return one.settings == other.settings or max(one.low, other.low) <= min(one.high, other.high)


def _previous_document(before: "Profile | None", made: "Profile") -> dict[str, Any] | None:
    if before is None or before.objective != made.objective:
        return None
    speeds = {"ratio": before.ratio, "low": before.low, "high": before.high}
    return {
        "date": before.date,
        "settings": dict(before.settings),
        **speeds,
        "agrees": _agrees(before, made),
    }


def _build_document(
    model: "Model", made: "Profile", found: "Found", budget: float
) -> dict[str, Any]:
    from dataclasses import asdict

    from llmcli.planning import tuned_profile

    comparison = found.comparison
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
        "flags": tuned_profile.words(made.settings),
        "comparison": None
        if comparison is None
        else {
            "ratio": comparison.ratio,
            "low": comparison.low,
            "high": None if math.isinf(comparison.high) else comparison.high,
            "confidence": comparison.confidence,
            "noisy": comparison.noisy,
            "defaults_per_second": comparison.a,
            "best_per_second": comparison.b,
        },
        "tried": [{**asdict(trial), "setting": asdict(trial.setting)} for trial in found.tried],
    }


def _print_result(model: "Model", made: "Profile", found: "Found", ui: "UI") -> None:
    from llmcli.commands.bench.tune_page import NAMES, value

    rows = [
        (
            NAMES.get(trial.option, trial.option),
            value(trial),
            f"{trial.ratio:.3f}",
            str(trial.rounds),
            "chosen" if trial.taken else "",
        )
        for trial in found.tried
    ]
    columns = ("option", "value", "speed", "rounds", "")
    ui.table(columns, rows, right=("speed", "rounds"))
    ui.text()
    ui.text(_verdict(model, made, found))
    comparison = found.comparison
    if comparison is not None and comparison.noisy:
        ui.warn(
            "speeds varied widely because something else uses this machine; "
            "on a quiet machine another setting may be best"
        )


def _verdict(model: "Model", made: "Profile", found: "Found") -> str:
    """Return the result in one line."""
    from llmcli.planning import tuned_profile

    prompt, generated = found.work.wanted
    workload = " and ".join(
        [f"{prompt} prompt tokens"] * bool(prompt) + [f"{generated} generated"] * bool(generated)
    )
    comparison, name = found.comparison, f"{model.name} for {made.objective} ({workload})"
    if comparison is None:
        return f"{name}: no tried setting is faster than the defaults"
    if found.faster:
        flags = tuned_profile.words(made.settings)
        return (
            f"{name}: {flags} is {_format_ratio(made)} the defaults' speed "
            f"({comparison.confidence:.0%}, {len(comparison.a)} pairs)"
        )
    return (
        f"{name}: the defaults are as fast as the best candidate: {_format_ratio(made)}, "
        f"{len(comparison.a)} pairs"
    )


def _format_ratio(one: "Profile") -> str:
    return f"{one.ratio:.3f}x ({one.low:.3f} to {one.high:.3f})"


def _list_profiles(config: "Config", ui: "UI") -> None:
    from dataclasses import asdict

    from llmcli.planning import tuned_profile

    profiles = tuned_profile.kept(config, ui.warn)
    if ui.json:
        ui.result(
            [
                {
                    **asdict(saved_profile),
                    "flags": tuned_profile.words(saved_profile.settings),
                    "here": saved_profile.here,
                }
                for saved_profile in profiles
            ]
        )
        return
    if not profiles:
        ui.text("no saved profiles: llmcli bench tune REF makes one")
        return
    rows = [
        (
            saved_profile.model,
            tuned_profile.words(saved_profile.settings) or "the defaults",
            saved_profile.objective,
            _format_ratio(saved_profile),
            saved_profile.date,
            "this one" if saved_profile.here else "another",
        )
        for saved_profile in profiles
    ]
    ui.table(("model", "flags", "for", "times defaults' speed", "date", "machine and build"), rows)


def _forget(ref: str, config: "Config", ui: "UI") -> None:
    from llmcli.catalog import fetch
    from llmcli.model_loader.installed_model import present
    from llmcli.planning import tuned_profile
    from quant.model_file import read_header

    resolved = fetch.resolve(ref, config)
    model = present(resolved, config, ui, ref)
    header = read_header.read(model.path) if model and model.kind == "gguf" else None
    deleted = tuned_profile.forget(config, resolved.ref.full, header)
    if ui.json:
        ui.result({"forgotten": [str(path) for path in deleted]})
    else:
        ui.text(f"deleted {several(len(deleted), 'profile')} of {resolved.ref.full}")


BENCHES = (grouped(tune),)
