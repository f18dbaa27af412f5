"""`llmcli bench history`: lists the saved measurements."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli.commands.command_line.command_context import start_command
from llmcli.commands.options.arguments import Json

if TYPE_CHECKING:
    from llmcli.bench.history.history import BenchRun

ModelFilter = Annotated[
    str | None, typer.Option("-m", "--model", help="Only models of this name or hash.")
]
MaxRows = Annotated[
    int | None, typer.Option("--last", min=1, help="Only the last N [20; with --json: all].")
]
DEFAULT_ROWS = 20


def history(model: ModelFilter = None, last: MaxRows = None, json: Json = False) -> None:
    """List earlier measurements; `llmcli bench compare` takes their numbers."""
    from llmcli.bench.history.history import History, history_path

    config, ui = start_command(json)
    runs = History(history_path(config), ui).runs(
        model=model, last=last or (None if json else DEFAULT_ROWS)
    )
    if json:
        ui.result([build_document(run) for run in runs])
        return
    if not runs:
        ui.text(
            "nothing was measured yet: llmcli bench smollm2:135m"
            if model is None
            else f"no measurement of {model!r}"
        )
        return
    columns = ("run", "time", "model", "test", "threads", "t/s")
    ui.table(columns, [_table_row(run) for run in runs], right=("run", "threads", "t/s"))
    machines = sorted({run.machine for run in runs})
    ui.text()
    ui.text(
        f"machine: {machines[0]}"
        if len(machines) == 1
        else f"measured on {len(machines)} machines; --json names them"
    )


def build_document(run: "BenchRun") -> dict[str, Any]:
    """Return a saved run as a JSON object: the fields of `bench -o json`, and the run's number,
    time, machine, build and model.
    """
    run_fields = {
        "id": run.id,
        "time": run.time,
        "machine": run.machine,
        "build": run.build,
        "model": run.model,
        "sha256": run.sha256,
        "content": run.content,
        "test": run.test,
    }
    return {**run.document, **run_fields}


def _table_row(run: "BenchRun") -> tuple[str, ...]:
    from llmcli.bench.speed.measure import average, standard_deviation

    rates, test_document = list(run.samples_ts), run.document
    speed = f"{average(rates):.2f} ± {standard_deviation(rates):.2f}"
    return (
        str(run.id),
        run.time,
        run.model,
        run.test,
        str(test_document.get("n_threads", "?")),
        speed,
    )


BENCHES = (history,)
