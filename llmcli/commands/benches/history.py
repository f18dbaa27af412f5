"""`llmcli bench history`: what was measured before, as it was kept."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli.commands.show import Json, start

if TYPE_CHECKING:
    from llmcli.bench.history import Run

Wanted = Annotated[
    str | None, typer.Option("-m", "--model", help="Only of models of this name, or this hash.")
]
Last = Annotated[
    int | None, typer.Option("--last", min=1, help="Only the last N [20; --json: all].")
]
SHOWN = 20


def history(model: Wanted = None, last: Last = None, json: Json = False) -> None:
    """List what was measured before: `llmcli bench compare` takes the numbers."""
    from llmcli.bench.history import History, path

    config, ui = start(json)
    runs = History(path(config), ui).runs(model=model, last=last or (None if json else SHOWN))
    if json:
        ui.result([document(run) for run in runs])
        return
    if not runs:
        ui.text(
            "nothing was measured yet: llmcli bench smollm2:135m"
            if model is None
            else f"nothing of {model!r}"
        )
        return
    columns = ("run", "time", "model", "test", "threads", "t/s")
    ui.table(columns, [_cells(run) for run in runs], right=("run", "threads", "t/s"))
    machines = sorted({run.machine for run in runs})
    ui.text()
    ui.text(
        f"machine: {machines[0]}"
        if len(machines) == 1
        else f"on {len(machines)} machines: --json names them"
    )


def document(run: "Run") -> dict[str, Any]:
    """One run: what is kept beside the test, and the test as `bench -o json` tells it."""
    kept = {
        "id": run.id,
        "time": run.time,
        "machine": run.machine,
        "build": run.build,
        "model": run.model,
        "sha256": run.sha256,
        "content": run.content,
        "test": run.test,
    }
    return {**run.document, **kept}


def _cells(run: "Run") -> tuple[str, ...]:
    from llmcli.bench.kernel import average, deviation

    rates, told = list(run.samples_ts), run.document
    speed = f"{average(rates):.2f} ± {deviation(rates):.2f}"
    return str(run.id), run.time, run.model, run.test, str(told.get("n_threads", "?")), speed


BENCHES = (history,)
