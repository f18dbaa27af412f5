"""`quantize --fold`: chooses where to fold a plan's model, prints the gain, and plans the folded
model. A fold rescales or reorders channels so that the quantization error falls but the unquantized
model stays the same.
"""

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from llmcli.ui import UI
from quant.native.processors import worker_count

if TYPE_CHECKING:
    from quant.quantize.plan import Plan


def apply_folds(plan: "Plan", requested_kinds: str, threads: int, ui: UI) -> "Plan":
    """Return the plan with the requested folds, or the unchanged plan if no fold is requested or
    none lowers the error. Raises UserError.
    """
    from quant.folds import choose, free_channels
    from quant.folds.folded_plan import fold_plan
    from quant.quantize.plan import apply_moments

    if not (kinds := choose.parse_fold_kinds(requested_kinds)):
        return plan
    sites = free_channels.find_sites(plan.source)
    with ui.bar(f"fold ({', '.join(kinds)})", len(sites), unit="sites") as bar:

        def show_progress(name: str) -> None:
            bar.advance(1)
            bar.describe(f"fold {name}")

        # moments that are collected during quantization cannot choose folds
        measured_plan = (
            replace(plan, steps=apply_moments(plan, {})) if plan.expected_moments else plan
        )
        site_choices = choose.choose_folds(
            measured_plan, kinds, threads or worker_count(), show_progress
        )
    folded_sites = [site for site in site_choices if site.fold is not None]
    kind_counts = Counter(site.label for site in folded_sites)
    kinds_text = ", ".join(f"{label} {count}" for label, count in kind_counts.most_common())
    if not folded_sites:
        ui.note(
            f"no fold lowers the error at any of {len(site_choices)} sites: the model is not folded"
        )
        return plan
    gain = 1 - sum(site.loss_ratio for site in folded_sites) / len(folded_sites)
    ui.note(
        f"folded {len(folded_sites)} of {len(site_choices)} sites, which lowers their sampled "
        "error by "
        f"{gain:.1%}: {kinds_text}"
    )
    return fold_plan(
        plan, [site.fold for site in folded_sites if site.fold is not None], ",".join(kinds)
    )
