"""`llmcli embed`: one vector for each line of some files, as JSONL or as a NumPy file. The vectors
are those of the server's `/v1/embeddings`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.api.embeddings import Shortening, encode_text, encode_vector, shorten_vector
from llmcli.batch.job import batch_id, count_failed
from llmcli.batch.output_line import encode_line, line_id
from llmcli.batch.run import BatchOutput, BatchResult
from llmcli.batch.scoring import npy_file
from llmcli.batch.scoring.executor import LineTexts
from llmcli.batch.scoring.run import (
    BatchIdentity,
    error_fields,
    model_identity,
    note_other_fields,
    run_scoring,
)
from llmcli.batch.scoring.text_files import SourceLine, TextFiles, read_text
from llmcli.errors import UsageError, UserError
from llmcli.runtime.binding.contexts.pooled_context import Vector
from llmcli.runtime.scoring.embedder import EUCLIDEAN, Embedder

if TYPE_CHECKING:
    from llmcli.batch.journal import BatchJournal
    from llmcli.model_loader.open_server_model import ServerModel
    from llmcli.ui import UI

VECTOR_MARK = b',"embedding":['  # only lines with a vector contain it (see ANSWERED_MARK)
TEXT_FIELD = "text"


@dataclass(frozen=True, slots=True)
class EmbedRequest:
    """How texts become vectors.

    - `out`: the output file, a NumPy file if its name ends with .npy.
    - `pooling`: how token vectors are combined; None: as the model file says.
    - `norm`: how vectors are scaled (see `normalize`).
    - `dimensions`: number of leading values that are kept; None: all.
    - `prompt`: text before each text. `field`: the field of a JSON object that has the text.
    - `truncate`: whether the end of a text that is too long is cut off.
    """

    out: Path
    pooling: str | None = None
    norm: int = EUCLIDEAN
    dimensions: int | None = None
    prompt: str = ""
    field: str = TEXT_FIELD
    truncate: bool = False

    @property
    def writes_npy(self) -> bool:
        """Whether the output is a NumPy file."""
        return self.out.name.endswith(npy_file.SUFFIX)

    def identity(self) -> dict[str, Any]:
        """Return what a vector depends on besides the model and the text, as JSON."""
        return {
            "norm": self.norm,
            "dimensions": self.dimensions,
            "prompt": self.prompt,
            "field": self.field,
            "truncate": self.truncate,
            "encoding": "npy" if self.writes_npy else "jsonl",
        }


class EmbeddingReader:
    """Reads texts from lines, and writes records with vectors. `n_truncated`: number of texts that
    were cut off; `other_fields`: names of fields of the input that have no effect.
    """

    def __init__(self, embedder: Embedder, request: EmbedRequest, batch: str) -> None:
        self._embedder, self._request, self._batch = embedder, request, batch
        self._size = vector_size(embedder, request)
        self.n_truncated = 0
        self.other_fields: set[str] = set()

    def read(self, line: SourceLine) -> LineTexts:
        """Return the text of a line. Raises UserError."""
        name, text = read_text(line, self._request.field, self.other_fields)
        text = self._request.prompt + text
        return LineTexts(
            len(text), partial(self._encode, text), partial(self._record, line.index, name, text)
        )

    def error_record(self, line: SourceLine, error: UserError) -> bytes:
        """Return the record of a line without a vector."""
        about = {"custom_id": line.read_name(), "error": error_fields(line, error)}
        if self._request.writes_npy:
            return encode_line(about)
        return encode_line({"id": line_id(self._batch, line.index), **about})

    def _encode(self, text: str) -> list[list[int]]:
        shortening = Shortening() if self._request.truncate else None
        return [encode_text(text, self._embedder, shortening, "the text")]

    def _record(
        self, index: int, name: str, text: str, ids: list[list[int]], vectors: list[Vector]
    ) -> bytes:
        """Return the record of a line with a vector."""
        (tokens,), (vector,) = ids, vectors
        is_truncated = self._request.truncate and self._is_truncated(text, tokens)
        self.n_truncated += is_truncated
        if not self._embedder.gives_token_vectors:
            vector = shorten_vector(vector, self._size)
        if self._request.writes_npy:
            return npy_file.vector_record(vector)
        return encode_line(
            {
                "id": line_id(self._batch, index),
                "custom_id": name,
                "embedding": encode_vector(vector, "float"),
                "prompt_tokens": len(tokens),
                **({"truncated": True} if is_truncated else {}),
            }
        )

    def _is_truncated(self, text: str, tokens: list[int]) -> bool:
        """Return whether `tokens` are not those of the whole text."""
        return len(tokens) == self._embedder.max_tokens and self._embedder.encode(text) != tokens


def vector_size(embedder: Embedder, request: EmbedRequest) -> int:
    """Return the number of values of each vector. Raises UserError if the model has no vectors or
    fewer values.
    """
    if embedder.is_reranker:
        raise UserError(
            "this model ranks pairs of texts and has no embeddings", hint="use: llmcli rerank"
        )
    if embedder.gives_token_vectors and (request.writes_npy or request.dimensions):
        raise UsageError(
            "--pooling none gives a vector for each token, "
            + ("and .npy has one row for a text" if request.writes_npy else "without --dimensions"),
            hint="write to a .jsonl file" if request.writes_npy else "leave out --dimensions",
        )
    size = request.dimensions or embedder.vector_size
    if size > embedder.vector_size:
        raise UserError(
            f"--dimensions is {size}, and this model's vectors have {embedder.vector_size} values",
            hint=f"--dimensions takes 1 to {embedder.vector_size}",
        )
    return size


def embed_files(
    hosted: "ServerModel", request: EmbedRequest, source: TextFiles, ui: "UI", *, force: bool
) -> BatchResult:
    """Compute the vectors of all lines of `source`, and write the output file. `force`: discard the
    work of an earlier run. Raises UserError.
    """
    hosted.runner.pooling = request.pooling
    embedder = hosted.runner.embedder()
    size = vector_size(embedder, request)
    survey = source.survey()
    identity = {**model_identity(hosted, survey, "embed"), **request.identity()}
    batch = batch_id(identity)
    reader = EmbeddingReader(embedder, request, batch)
    output = _output(request, size, batch, identity, survey.count)
    result = run_scoring(
        hosted.runner,
        reader,
        request.norm,
        source,
        survey,
        BatchIdentity(identity, output),
        request.out,
        ui,
        force=force,
    )
    if reader.n_truncated:
        ui.note(f"texts cut to {embedder.max_tokens:,} tokens: {reader.n_truncated:,} (--truncate)")
    note_other_fields(reader.other_fields, ui)
    return result


def _output(
    request: EmbedRequest, size: int, batch: str, identity: Mapping[str, Any], count: int
) -> BatchOutput:
    """Return how the output file is written and recognized."""
    if not request.writes_npy:
        return BatchOutput(
            "embed",
            partial(count_failed, batch, request.out, count, VECTOR_MARK),
            lambda journal: journal.finish(),
        )
    writer = npy_file.NpyWriter(request.out, size, batch, identity)

    def finish(journal: "BatchJournal") -> None:
        journal.finish(writer.write, writer.write_about)

    return BatchOutput("embed", partial(npy_file.count_failed, batch, request.out), finish)
