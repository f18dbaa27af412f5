"""The charts and the HTML report of `llmcli bench tune`: the tried settings and their speeds."""

from typing import TYPE_CHECKING

from llmcli.bench import report_page
from llmcli.bench.plots import pairs
from llmcli.bench.plots.pairs import SpeedRatio
from llmcli.charts.chart import Chart

if TYPE_CHECKING:
    from llmcli.bench.tune.tune import TriedSetting, TuningResult
    from llmcli.charts.html_page import ReportPage

OPTION_LABELS = {"threads_batch": "prompt threads", "mode": "flash attention"}


def format_value(trial: "TriedSetting") -> str:
    """Format the tried value of an option as text."""
    mode = f"{trial.setting.flash}, KV {trial.setting.cache}"
    return mode if trial.option == "mode" else str(getattr(trial.setting, trial.option))


def build_charts(result: "TuningResult") -> list[Chart]:
    """Return two charts: the best settings compared with the defaults, and each tried value
    compared with the best value before it.
    """
    comparison = result.comparison
    charts: list[Chart] = []
    if comparison is not None:
        best = SpeedRatio(
            "best settings",
            comparison.ratio,
            comparison.low,
            comparison.high,
            f"{comparison.ratio:.3f}",
        )
        caption = (
            "The difference is larger than the noise."
            if result.is_faster
            else "The defaults are as fast."
        )
        caption += f" Measured again, in {len(comparison.a)} pairs."
        charts.append(
            pairs.build_chart(
                "Best settings relative to the defaults",
                caption,
                "times the defaults' speed",
                [best],
            )
        )
    trial_ratios = [
        SpeedRatio(
            f"{OPTION_LABELS.get(trial.option, trial.option)} {format_value(trial)}",
            trial.ratio,
            verdict="chosen" if trial.taken else "",
        )
        for trial in result.tried
    ]
    if trial_ratios:
        caption = "Each value relative to the best before it; most were measured in few rounds."
        charts.append(
            pairs.build_chart("Tried values", caption, "times the best before", trial_ratios)
        )
    return charts


def build_page(name: str, verdict: str, result: "TuningResult") -> "ReportPage":
    """Return the HTML report. `verdict`: the result as one sentence."""
    about = f"{result.seconds:.0f} seconds of measurements"
    return report_page.build_page(
        f"The fastest settings of {name}", about, [verdict], build_charts(result)
    )
