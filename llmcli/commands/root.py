"""The Typer app: every command, registered."""

import typer

from llmcli import __version__
from llmcli.commands import (
    batch,
    benches,
    calibrate,
    chat,
    convert,
    diff,
    doctor,
    eval,
    exports,
    models,
    pareto,
    plan,
    quantize,
    serve,
    sessions,
    show,
    worker,
)

app = typer.Typer(
    name="llmcli",
    help="From a checkpoint to tokens on this machine: pull, quantize, chat, bench.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"llmcli {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version and leave."
    ),
) -> None:
    """From a checkpoint to tokens on this machine: pull, quantize, chat, bench."""


models.register(app)
show.register(app)
diff.register(app)
convert.register(app)
quantize.register(app)
chat.register(app)
serve.register(app)
sessions.register(app)
benches.register(app)
plan.register(app)
doctor.register(app)
eval.register(app)
calibrate.register(app)
pareto.register(app)
batch.register(app)
exports.register(app)
worker.register(app)
