"""Writes the files of a batch that has ended: its answers, and its errors."""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from llmcli.batch import output_line
from llmcli.batch.input_lines import BatchInput
from llmcli.batch.journal import BatchJournal
from llmcli.batch.request_line import read_line_name
from llmcli.serve.batches.file_store import FILE_PREFIX, ID_DIGITS, FileStore
from llmcli.serve.batches.records import StoredBatch

EXPIRED = {
    "code": "batch_expired",
    "message": "the completion window of the batch ended before this request was answered",
}
STORAGE_FULL = {
    "code": "storage_full",
    "message": "the files of this server reached their limit before this request was answered",
}
OUTPUT_PURPOSE = "batch_output"


@dataclass(frozen=True, slots=True)
class BatchFiles:
    """The files of a batch: their ids (None: it would be empty), and how many lines they have."""

    output_id: str | None
    error_id: str | None
    n_answers: int
    n_errors: int


def count_lines(journal: BatchJournal) -> tuple[int, int]:
    """Return how many finished lines of a journal have an answer, and how many an error."""
    n_answered = sum(output_line.ANSWERED_MARK in raw for raw in journal.finished_lines())
    return n_answered, journal.n_finished - n_answered


def output_lines(
    journal: BatchJournal, job_id: str, source: BatchInput, reason: Mapping[str, str] | None
) -> Iterator[bytes]:
    """Yield the output lines of a batch with their newlines, in the order of the input. `job_id`: the
    id in the lines (BatchJob). `reason`: the error of lines that were not answered; None: they are
    left out.
    """
    finished = journal.finished_lines()
    for line in source.lines():
        if journal.has(line.index):
            yield next(finished)
        elif reason:
            document = {
                "id": output_line.line_id(job_id, line.index),
                "custom_id": read_line_name(line),
                "response": None,
                "error": reason,
            }
            yield output_line.encode_line(document) + b"\n"


def write_files(
    store: FileStore, lines: Callable[[], Iterator[bytes]], batch: StoredBatch
) -> BatchFiles:
    """Write the output lines of a batch to its two files. Files of an earlier try, which was killed
    before the batch was closed, are replaced.
    """
    output_id, n_answers = _write_file(store, lines, batch, "output")
    error_id, n_errors = _write_file(store, lines, batch, "error")
    return BatchFiles(output_id, error_id, n_answers, n_errors)


def _write_file(
    store: FileStore, lines: Callable[[], Iterator[bytes]], batch: StoredBatch, kind: str
) -> tuple[str | None, int]:
    """Write the lines of a kind, `output` or `error`. Return the id of the file, None if there are
    none, and the number of lines.
    """
    digits = hashlib.sha256(f"{batch.id} {kind}".encode()).hexdigest()[:ID_DIGITS]
    # the journal has reserved the space
    upload = store.begin_upload(file_id=f"{FILE_PREFIX}{digits}", is_limited=False)
    n_lines = 0
    try:
        for raw in lines():
            if (output_line.ANSWERED_MARK in raw) == (kind == "output"):
                upload.write(raw)
                n_lines += 1
        if not n_lines:
            upload.abort()
            return None, 0
        expires_at = int(time.time()) + batch.kept_seconds
        name = f"{batch.id}_{kind}.jsonl"
        return upload.finish(name, OUTPUT_PURPOSE, batch.owner, expires_at).id, n_lines
    except BaseException:
        upload.abort()
        raise
