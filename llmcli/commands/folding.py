"""`quantize --fold`: choose folds for a plan, say what they gain, and plan the folded model. The
rest is quant's.
"""

import os
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from llmcli.ui import UI

if TYPE_CHECKING:
    from quant.planning import Plan

Fold = Annotated[
    str,
    typer.Option(
        metavar="KINDS",
        help="Rescale and reorder channels exactly, so that rounding loses less: awq (columns that matter get more of "
        "a block's range), smooth (activations' range moves into weights), deal (channels dealt out over blocks), "
        "several with commas; auto: what was found to pay. Chosen by --imatrix or --moments; each is kept where the "
        "error falls.",
        show_default=True,
    ),
]


def folded(plan: "Plan", text: str, threads: int, ui: UI) -> "Plan":
    """The plan under the folds that `text` asks for; the plan itself where it asks for none."""
    from quant.folds import choose, wiring
    from quant.folds.replan import folded as under
    from quant.planning import known

    if not (kinds := choose.parse(text)):
        return plan
    sites = wiring.sites(plan.source)
    with ui.bar(f"fold ({', '.join(kinds)})", len(sites), unit="sites") as bar:

        def watch(name: str) -> None:
            bar.advance(1)
            bar.describe(f"fold {name}")

        now = (
            replace(plan, steps=known(plan, {})) if plan.pending else plan
        )  # what comes later tells nothing
        found = choose.choose(now, kinds, threads or os.cpu_count() or 1, watch)
    taken = [site for site in found if site.fold is not None]
    hows = Counter(site.how for site in taken)
    told = ", ".join(f"{how} {count}" for how, count in hows.most_common())
    if not taken:
        ui.note(f"no fold lowers the error of any of {len(found)} sites: the model stays as it is")
        return plan
    gain = 1 - sum(site.ratio for site in taken) / len(taken)
    ui.note(
        f"{len(taken)} of {len(found)} sites folded, their sampled error {gain:.1%} lower: {told}"
    )
    return under(plan, [site.fold for site in taken if site.fold is not None], ",".join(kinds))
