"""Runs the lines of some files through the embedder of one open model: resumes from the journal,
reports the errors of lines, and writes the output file.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.api.errors import as_api_error
from llmcli.batch.input_lines import LineSurvey
from llmcli.batch.journal import BatchJournal
from llmcli.batch.request_line import DamagedLine
from llmcli.batch.run import BatchOutput, BatchResult, run_or_resume
from llmcli.batch.scoring.executor import LineReader, ScoringExecutor
from llmcli.batch.scoring.text_files import SourceLine, TextFiles
from llmcli.errors import UserError
from llmcli.runtime import kv_state_file
from llmcli.units import format_count

if TYPE_CHECKING:
    from llmcli.model_loader.open_server_model import ServerModel
    from llmcli.runtime.runner import Runner
    from llmcli.ui import UI

MAX_PRINTED_ERRORS = 5  # lines whose error is printed


@dataclass(frozen=True, slots=True)
class BatchIdentity:
    """What the results of a batch depend on, and how its output file is recognized."""

    fields: Mapping[str, Any]
    output: BatchOutput


def model_identity(hosted: "ServerModel", survey: LineSurvey, command: str) -> dict[str, Any]:
    """Return the part of a batch's identity that `embed` and `rerank` share, as JSON."""
    embedder = hosted.runner.embedder()
    model = kv_state_file.state_identity(hosted.runner)
    return {
        "command": command,
        "input": survey.sha256,
        "lines": survey.count,
        "model": model.as_dict() if model else hosted.name,
        "name": hosted.name,
        "context": embedder.max_tokens,
        "pooling": embedder.pooling,
    }


def error_fields(line: SourceLine, error: UserError) -> dict[str, Any]:
    """Return the object `error` of an output line."""
    code = error.code if isinstance(error, DamagedLine) else as_api_error(error).code
    return {
        "code": code,
        "message": str(error),
        "line": line.line.number,
        **({"file": line.file} if line.file else {}),
    }


def run_scoring(
    runner: "Runner",
    reader: LineReader,
    norm: int,
    source: TextFiles,
    survey: LineSurvey,
    identity: BatchIdentity,
    out: Path,
    ui: "UI",
    *,
    force: bool,
) -> BatchResult:
    """Compute all lines that the journal of `out` does not have, and write `out`. Raises UserError
    if the journal belongs to other work, or if the model fails.
    """
    if survey.blank:
        ui.note(f"{format_count(survey.blank, 'blank line')} skipped")
    journal = BatchJournal(out, identity.fields, survey.count)
    n_errors = 0

    def report_error(line: SourceLine, error: UserError) -> None:
        nonlocal n_errors
        n_errors += 1
        if n_errors <= MAX_PRINTED_ERRORS:
            message = str(error).removeprefix(f"line {line.line.number}: ")
            ui.warn(f"{line.location}: {message}")

    executor = ScoringExecutor(runner, reader, norm, journal.append, report_error)
    result = run_or_resume(
        executor,
        journal,
        identity.output,
        lambda: executor.run(source.lines(), journal.has),
        force,
        ui,
        is_reproducible=True,
    )
    if n_errors > MAX_PRINTED_ERRORS:
        ui.warn(f"and {format_count(n_errors - MAX_PRINTED_ERRORS, 'more line')} with an error")
    return result


def note_other_fields(names: Iterable[str], ui: "UI") -> None:
    """Print the names of fields of the input that have no effect."""
    if listed := ", ".join(sorted(names)):
        ui.note(f"fields without an effect: {listed[:200]}")
