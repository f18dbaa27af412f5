"""Prints the summary of a run over the lines of a file: batch, embed, rerank."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from llmcli.units import format_count

if TYPE_CHECKING:
    from llmcli.batch.run import BatchResult
    from llmcli.ui import UI


def print_result(
    result: "BatchResult", ui: "UI", token_counts: Mapping[str, Any], noun: str, failed_hint: str
) -> None:
    """Print the summary of a run. `token_counts`: fields for --json. `noun`: what each line gets.
    `failed_hint`: how to see the errors of lines.

    Raises typer.Exit if the run was stopped, or if some lines have an error.
    """
    if ui.json:
        ui.result(
            {
                "path": str(result.out),
                "lines": result.lines,
                "finished": not result.is_stopped,
                "resumed_lines": result.resumed_lines,
                "failed": result.failed,
                **token_counts,
                "elapsed_ms": result.seconds * 1000,
                "tokens_per_second": result.tokens_per_second,
            }
        )
    if result.is_stopped:
        ui.note(
            f"stopped after {result.n_finished:,} of {result.lines:,} lines; the same command "
            "resumes"
        )
        raise typer.Exit(130)
    speed = (
        "already complete; --force computes them again"
        if result.was_complete
        else f"{result.tokens:,} tokens in {result.seconds:,.1f} s, "
        f"{result.tokens_per_second:,.1f} tokens/s"
    )
    ui.text(f"{result.out}: {format_count(result.lines, 'line')}, {speed}")
    if result.failed:
        ui.error(
            f"{result.failed:,} of {result.lines:,} lines have no {noun}",
            hint=failed_hint,
        )
        raise typer.Exit(1)
