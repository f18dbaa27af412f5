"""The files and batches of `/v1/files` and `/v1/batches`, as they are stored, and as OpenAI's objects.
Times are Unix times in seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
# A batch with one of these has more work to do.
OPEN_STATUSES: tuple[BatchStatus, ...] = ("validating", "in_progress", "finalizing", "cancelling")
# The field of a batch that tells since when it has a status.
TIME_FIELDS: dict[BatchStatus, str] = {
    "in_progress": "in_progress_at",
    "finalizing": "finalizing_at",
    "completed": "completed_at",
    "failed": "failed_at",
    "expired": "expired_at",
    "cancelling": "cancelling_at",
    "cancelled": "cancelled_at",
}
KEPT_SECONDS = 30 * 24 * 3600  # after this time, files and closed batches are removed
ERROR_FIELDS = ("code", "message", "param", "line")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a client. `owner`: a hash of the client's key; empty if the server has no keys."""

    id: str
    filename: str
    purpose: str
    n_bytes: int
    created_at: int
    owner: str = ""
    expires_at: int | None = None

    def to_document(self) -> dict[str, Any]:
        """Return OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.n_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True, slots=True)
class BatchProblem:
    """What is wrong with the input of a batch. `line`: the number of the line, from 1; None: none in
    particular.
    """

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch. `times`: by the name of a field of TIME_FIELDS, when the batch got that status.
    `n_total`, `n_completed`, `n_failed`: lines of the input, lines with an answer and with an error.
    `model`, `model_hash`: the name and the hash of the model for which it was created, and which
    answers all its lines; of a server of several models, "" and the mark of such servers.
    `kept_seconds`: for how long its files are kept.
    """

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    owner: str = ""
    metadata: Mapping[str, str] | None = None
    status: BatchStatus = "validating"
    times: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[BatchProblem, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    n_total: int = 0
    n_completed: int = 0
    n_failed: int = 0
    model: str = ""
    model_hash: str = ""
    kept_seconds: int = KEPT_SECONDS

    @property
    def is_open(self) -> bool:
        """Whether there is more to do for this batch."""
        return self.status in OPEN_STATUSES

    def to_document(self, obstacle: BatchProblem | None = None) -> dict[str, Any]:
        """Return OpenAI's batch object. `obstacle`: why the batch cannot go on at present."""
        problems = [
            {name: getattr(problem, name) for name in ERROR_FIELDS}
            for problem in (*self.problems, *((obstacle,) if obstacle else ()))
        ]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model or None,
            "errors": {"object": "list", "data": problems} if problems else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{name: self.times.get(name) for name in TIME_FIELDS.values()},
            "request_counts": {
                "total": self.n_total,
                "completed": self.n_completed,
                "failed": self.n_failed,
            },
            "metadata": None if self.metadata is None else dict(self.metadata),
        }
