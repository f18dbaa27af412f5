"""What a batch worker needs from whatever answers the lines of batches: the model of this process
(engine_lines.py), or several models in other processes.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from llmcli.api.forms.base import Document
from llmcli.batch.job import LineOutputs
from llmcli.batch.request_line import BatchRequest
from llmcli.serve.batches.records import StoredBatch


class BatchLines(Protocol):
    """Answers the lines of one batch. `outputs`: makes its output lines."""

    @property
    def outputs(self) -> LineOutputs:
        """What makes the output lines."""
        ...

    async def answer(self, request: BatchRequest, client: str) -> Document:
        """Return the document of the answer to a line. `client`: the id of the batch's client, for
        fair scheduling. Raises UserError, which becomes the result of the line, and ServerStopping.
        """
        ...


class LineAnswers(Protocol):
    """Answers the lines of the batches of a server."""

    @property
    def model_name(self) -> str:
        """The name of the model of new batches; "" if each line names its own."""
        ...

    @property
    def is_stopping(self) -> bool:
        """Whether the server stops, so that lines fail which would be answered later."""
        ...

    def read_model_hash(self) -> str:
        """Return what tells whether a batch was created for this server's models. May wait for the
        disk.
        """
        ...

    def parallel(self, endpoint: str) -> int:
        """Return how many lines for a path are answered at once."""
        ...

    def open(self, batch: StoredBatch, identity: Mapping[str, Any]) -> BatchLines:
        """Return what answers the lines of a batch. `identity`: what its ids are made of."""
        ...
