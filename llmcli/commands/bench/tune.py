"""`llmcli bench tune`: searches for the fastest settings of a model, and saves them as a
profile.
"""

import math
from datetime import date
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli.commands.command_line.command_context import start_command
from llmcli.commands.command_line.completion import complete_models
from llmcli.commands.options.arguments import Json, Trust
from llmcli.commands.options.groups import with_option_groups
from llmcli.commands.options.placement import PlacementGroup
from llmcli.commands.options.report import ReportOptions, ReportSettings, show_report
from llmcli.errors import UsageError, UserError
from llmcli.units import format_count

if TYPE_CHECKING:
    from llmcli.bench.tune.tune import RunSetting, SearchSpace, TuningResult
    from llmcli.catalog.fetch import FetchedModel
    from llmcli.config import Config
    from llmcli.planning.measurements.tuned_profile import TunedProfile
    from llmcli.runtime.binding.placement.model_placement import ModelPlacement
    from llmcli.runtime.requests.placement_options import PlacementOptions
    from llmcli.runtime.requests.request import RunOptions
    from llmcli.ui import UI
    from quant.model_file.model_header import ModelHeader

Budget = Annotated[
    float, typer.Option("--budget", metavar="SECONDS", help="Longest measuring time.")
]
Objective = Annotated[
    str,
    typer.Option(
        "--for",
        metavar="WHAT",
        help="What to optimize: chat (512 prompt tokens, 128 generated), prompts or answers.",
    ),
]
CacheTypes = Annotated[
    str | None,
    typer.Option(
        "--kv", metavar="TYPES", help="Also try these KV cache types (q8_0), which change the text."
    ),
]
Show = Annotated[bool, typer.Option("--show", help="List the saved profiles.")]
Forget = Annotated[
    str | None,
    typer.Option(
        "--forget",
        metavar="REF",
        autocompletion=complete_models,
        help="Delete the profile of a model.",
    ),
]
OPTION_OF_SETTING = {"threads": "threads", "ubatch": "ubatch_size", "flash": "flash_attn"}


def tune(
    ref: Annotated[
        str | None,
        typer.Argument(
            metavar="REF",
            autocompletion=complete_models,
            help="catalog name, org/repo[:QUANT], file",
        ),
    ] = None,
    budget: Budget = 120.0,
    objective: Objective = "chat",
    kv: CacheTypes = None,
    show: Show = False,
    forget: Forget = None,
    *,
    reporting: ReportOptions,
    offline: Annotated[bool, typer.Option("--offline", help="Make no network connection.")] = False,
    trust: Trust = False,
    json: Json = False,
    placement_flags: PlacementGroup,
) -> None:
    """Find the fastest settings of a model on this machine, and save them for chat and run.

    Tries threads, micro-batches and flash attention, and compares the best settings with the
    defaults in pairs. A default is kept unless another value is faster.
    """
    from llmcli.bench.tune.tune import OBJECTIVES

    config, ui = start_command(json, offline, trust=trust)
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
        from llmcli.runtime.requests.request import RunOptions

        reporting.check_path()
        options = RunOptions().with_placement(placement_flags.join(ui))
        _tune(ref, options, budget, objective, kv, reporting, config, ui)


def _tune(
    ref: str,
    requested: "RunOptions",
    budget: float,
    objective: str,
    cache_types: str | None,
    reporting: ReportSettings,
    config: "Config",
    ui: "UI",
) -> None:
    from llmcli.bench.tune.tune import RunSetting
    from llmcli.commands.bench.reports.tune import build_charts, build_page
    from llmcli.model_loader.prepare import prepare_model
    from llmcli.model_loader.rehearsal.rehearse import rehearse_model
    from llmcli.planning import resolve_options
    from llmcli.planning.measurements import tuned_profile
    from llmcli.runtime import model_identity
    from quant.model_file import load_checks, read_header

    model = prepare_model(ref, None, config, ui)
    header = read_header.read_header(model.path)
    load_checks.check_loadable(header)
    rehearse_model(header, config, ui)
    options, placement = resolve_options.resolve_options(
        header, requested, ui.warn, note=ui.note, config=config
    )
    options = resolve_options.resolve_flash_attention(
        header, options, placement, config, resolve_options.spare_sequences(header, options)
    )
    assert options.threads, options
    default = RunSetting(options.threads, options.threads, flash=options.flash_attn)
    space = _build_space(header, cache_types, default.flash)
    previous = tuned_profile.find_profile(header, config, ui.warn, requested)
    try:
        result = _search(header, placement, default, space, objective, budget, ui)
    except KeyboardInterrupt:
        ui.note("stopped: no profile was written; an earlier one is kept")
        raise
    saved = _build_profile(model, model_identity.content_hash(header), objective, result, requested)
    path = tuned_profile.save_profile(saved, config)
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
            flags = tuned_profile.format_flags(previous.settings) or "the defaults"
            ui.text(
                f"{agrees} with the profile of {previous.date}: {flags}, {_format_ratio(previous)}"
            )
        ui.text(
            f"saved in {path}: chat and run use it (--no-profile ignores it)"
            if saved.settings
            else f"saved in {path}"
        )
    verdict = _verdict(model, saved, result)
    show_report(
        lambda: build_page(model.name, verdict, result),
        lambda: build_charts(result)[:1],
        reporting,
        ui,
    )


def _search(
    header: "ModelHeader",
    placement: "ModelPlacement",
    default: "RunSetting",
    space: "SearchSpace",
    objective: str,
    budget: float,
    ui: "UI",
) -> "TuningResult":
    from llmcli.bench.tune import model_trial, tune
    from llmcli.runtime.binding.model import open_model

    longest = sum(tune.OBJECTIVES[objective])
    model_loading = open_model(header.path, placement.for_header(header))
    with ui.bar(f"tune {header.path.name}", None, "tests") as bar, model_loading as model:
        with model_trial.ModelTrial(model, longest) as trial:
            return tune.tune_settings(
                trial, space, default, objective, budget, tick=lambda: bar.advance(1)
            )


def _build_space(
    header: "ModelHeader", cache_types: str | None, default_flash: str
) -> "SearchSpace":
    """Return the values to try: threads, micro-batch sizes, and attention modes. An attention mode
    is a flash attention setting with a cache type that it supports.

    `cache_types`: the text of --kv. `default_flash`: the default flash attention setting; if it is
    "off", "on" is tried instead of "auto".
    """
    from llmcli.bench.speed import parameter_grid, sweep
    from llmcli.bench.tune import tune
    from llmcli.hardware import host
    from llmcli.runtime import kv_size
    from llmcli.runtime.binding.contexts.cache_types import KV_TYPES, check_cache_types

    modes = []
    for kind in dict.fromkeys(
        [
            "f16",
            *(
                parameter_grid.parse_words("--kv", [cache_types], list(KV_TYPES))
                if cache_types
                else []
            ),
        ]
    ):
        kv_size.check_cache(header.metadata, kind, kind)
        for flash in ("on" if default_flash == "off" else "auto", "off"):
            try:
                check_cache_types(kind, kind, flash)
            except UserError:
                continue
            modes.append((flash, kind))
    return tune.SearchSpace(
        tune.thread_counts(host.core_count(), host.cpu_count()), sweep.UBATCH_SIZES, modes
    )


def _changed_options(result: "TuningResult") -> dict[str, Any]:
    """Return the run options whose best value differs from the default. -tb is included only if it
    differs from -t.
    """
    best_setting, default = result.setting, result.default
    changed: dict[str, Any] = {
        option: getattr(best_setting, name)
        for name, option in OPTION_OF_SETTING.items()
        if getattr(best_setting, name) != getattr(default, name)
    }
    if best_setting.threads_batch != best_setting.threads:
        changed["threads_batch"] = best_setting.threads_batch
    if best_setting.cache != default.cache:
        changed["cache_type_k"] = changed["cache_type_v"] = best_setting.cache
    return changed


def _build_profile(
    model: "FetchedModel",
    content_hash: str,
    objective: str,
    result: "TuningResult",
    placement: "PlacementOptions",
) -> "TunedProfile":
    from llmcli.planning.measurements.tuned_profile import (
        TunedProfile,
        build_identity,
        profile_machine,
    )

    comparison = result.comparison
    speeds = (
        (1.0, 1.0, 1.0)
        if comparison is None
        else (comparison.ratio, comparison.low, min(comparison.high, 1e9))
    )
    return TunedProfile(
        model.name,
        content_hash,
        profile_machine(placement),
        build_identity(),
        objective,
        _changed_options(result),
        *speeds,
        date.today().isoformat(),
    )


def _agrees(first: "TunedProfile", second: "TunedProfile") -> bool:
    """Return whether two profiles contain the same settings, or have overlapping intervals of
    speed.
    """
    return first.settings == second.settings or max(first.low, second.low) <= min(
        first.high, second.high
    )


def _previous_document(
    previous: "TunedProfile | None", saved: "TunedProfile"
) -> dict[str, Any] | None:
    if previous is None or previous.objective != saved.objective:
        return None
    speeds = {"ratio": previous.ratio, "low": previous.low, "high": previous.high}
    return {
        "date": previous.date,
        "settings": dict(previous.settings),
        **speeds,
        "agrees": _agrees(previous, saved),
    }


def _build_document(
    model: "FetchedModel", saved: "TunedProfile", result: "TuningResult", budget: float
) -> dict[str, Any]:
    from dataclasses import asdict

    from llmcli.planning.measurements import tuned_profile

    comparison = result.comparison
    return {
        "model": {"name": model.name, "path": str(model.path)},
        "machine": saved.machine,
        "build": saved.build,
        "for": saved.objective,
        "measured_tokens": dict(zip(("prompt", "generated"), result.workload.tokens, strict=True)),
        "budget_seconds": budget,
        "spent_seconds": result.seconds,
        "defaults": asdict(result.default),
        "best": asdict(result.best),
        "faster": result.is_faster,
        "settings": dict(saved.settings),
        "flags": tuned_profile.format_flags(saved.settings),
        "comparison": None
        if comparison is None
        else {
            "ratio": comparison.ratio,
            "low": comparison.low,
            "high": None if math.isinf(comparison.high) else comparison.high,
            "confidence": comparison.confidence,
            "noisy": comparison.is_noisy,
            "defaults_per_second": comparison.a,
            "best_per_second": comparison.b,
        },
        "tried": [{**asdict(trial), "setting": asdict(trial.setting)} for trial in result.tried],
    }


def _print_result(
    model: "FetchedModel", saved: "TunedProfile", result: "TuningResult", ui: "UI"
) -> None:
    from llmcli.commands.bench.reports.tune import OPTION_LABELS, format_value

    rows = [
        (
            OPTION_LABELS.get(trial.option, trial.option),
            format_value(trial),
            f"{trial.ratio:.3f}",
            str(trial.rounds),
            "chosen" if trial.taken else "",
        )
        for trial in result.tried
    ]
    columns = ("option", "value", "speed", "rounds", "")
    ui.table(columns, rows, right=("speed", "rounds"))
    ui.text()
    ui.text(_verdict(model, saved, result))
    comparison = result.comparison
    if comparison is not None and comparison.is_noisy:
        ui.warn(
            "speeds varied widely because something else uses this machine; "
            "on a quiet machine another setting may be best"
        )


def _verdict(model: "FetchedModel", saved: "TunedProfile", result: "TuningResult") -> str:
    """Return the result of the search as one sentence."""
    from llmcli.planning.measurements import tuned_profile

    prompt, generated = result.workload.objective_tokens
    workload = " and ".join(
        [f"{prompt} prompt tokens"] * bool(prompt) + [f"{generated} generated"] * bool(generated)
    )
    comparison, name = result.comparison, f"{model.name} for {saved.objective} ({workload})"
    if comparison is None:
        return f"{name}: no tried setting is faster than the defaults"
    if result.is_faster:
        flags = tuned_profile.format_flags(saved.settings)
        return (
            f"{name}: {flags} is {_format_ratio(saved)} the defaults' speed "
            f"({comparison.confidence:.0%}, {len(comparison.a)} pairs)"
        )
    return (
        f"{name}: the defaults are as fast as the best candidate: {_format_ratio(saved)}, "
        f"{len(comparison.a)} pairs"
    )


def _format_ratio(saved: "TunedProfile") -> str:
    return f"{saved.ratio:.3f}x ({saved.low:.3f} to {saved.high:.3f})"


def _list_profiles(config: "Config", ui: "UI") -> None:
    from dataclasses import asdict

    from llmcli.planning.measurements import tuned_profile

    profiles = tuned_profile.read_profiles(config, ui.warn)
    if ui.json:
        ui.result(
            [
                {
                    **asdict(saved_profile),
                    "flags": tuned_profile.format_flags(saved_profile.settings),
                    "here": saved_profile.is_current,
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
            tuned_profile.format_flags(saved_profile.settings) or "the defaults",
            saved_profile.objective,
            _format_ratio(saved_profile),
            saved_profile.date,
            "this one" if saved_profile.is_current else "another",
        )
        for saved_profile in profiles
    ]
    ui.table(("model", "flags", "for", "times defaults' speed", "date", "machine and build"), rows)


def _forget(ref: str, config: "Config", ui: "UI") -> None:
    from llmcli.catalog import fetch
    from llmcli.model_loader.installed_model import installed_model
    from llmcli.planning.measurements import tuned_profile
    from quant.model_file import read_header

    resolved = fetch.resolve_ref(ref, config)
    model = installed_model(resolved, config, ui, ref)
    header = read_header.read_header(model.path) if model and model.kind == "gguf" else None
    deleted = tuned_profile.delete_profiles(config, resolved.ref.full_name, header)
    if ui.json:
        ui.result({"forgotten": [str(path) for path in deleted]})
    else:
        ui.text(f"deleted {format_count(len(deleted), 'profile')} of {resolved.ref.full_name}")


BENCHES = (with_option_groups(tune),)
