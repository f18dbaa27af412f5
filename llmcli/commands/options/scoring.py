"""The options that embed and rerank share."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

import typer

from llmcli.batch.output_file import require_output
from llmcli.batch.scoring.open_model import ScoringOptions
from llmcli.commands.options.groups import flag_option, option_group
from llmcli.commands.options.pooling import check_pooling
from llmcli.commands.options.run import PANEL_OF_FLAG, RUNTIME_FLAGS
from llmcli.errors import UsageError

Files = Annotated[
    list[str] | None,
    typer.Argument(metavar="FILE...", help="Files of lines; may be .gz; - is stdin."),
]
TextFormat = Annotated[
    str,
    typer.Option(
        "--format",
        metavar="auto|jsonl|text",
        help="What a line is: JSON, or a text itself; auto: JSON in .jsonl files.",
    ),
]
Field = Annotated[
    str, typer.Option("--field", metavar="NAME", help="The field of a JSON object with the text.")
]
Force = Annotated[bool, typer.Option("--force", help="Start again even if results exist.")]
HELP = {"ctx_size": "tokens of the longest text; default: the model's, up to 8192"}
FLAGS = {
    flag.name: replace(flag, help=HELP.get(flag.name, flag.help))
    for flag in RUNTIME_FLAGS
    if flag.name in {field.name for field in fields(ScoringOptions)}
}
ModelOptions = Annotated[
    ScoringOptions,
    option_group(**{name: flag_option(flag, PANEL_OF_FLAG[name]) for name, flag in FLAGS.items()}),
]


def check_words(
    command: str,
    files: list[str] | None,
    out: Path | None,
    text_format: str,
    pooling: str | None,
) -> tuple[list[str], Path]:
    """Return the input files and the path of the output file of `command`. Raises UsageError if one
    is missing or an option has an unknown value, and UserError if the output cannot be written.
    """
    from llmcli.batch.scoring.text_files import FORMATS

    if not files or out is None:
        raise UsageError(
            f"{command} needs a model, input files and an output file",
            hint=f"llmcli {command} REF FILE... -o OUT.jsonl",
        )
    if text_format not in FORMATS:
        raise UsageError(
            f"--format is {text_format!r}", hint=f"--format takes {', '.join(FORMATS)}"
        )
    check_pooling(pooling)
    return files, require_output(out.absolute(), files)
