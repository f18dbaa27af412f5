"""`llmcli rerank`: ranks the documents of each line by the line's query, or all lines of some files
as documents by one query. The scores are those of the server's `/v1/rerank`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from llmcli.api.bodies.base import json_type
from llmcli.api.rerank import RerankRequest, encode_pairs, rank, read_score, require_reranker
from llmcli.api.server_settings import ServerSettings
from llmcli.batch.job import batch_id, count_failed
from llmcli.batch.output_line import encode_line, line_id
from llmcli.batch.run import BatchOutput, BatchResult
from llmcli.batch.scoring.embed import TEXT_FIELD
from llmcli.batch.scoring.executor import LineTexts
from llmcli.batch.scoring.run import (
    BatchIdentity,
    error_fields,
    model_identity,
    note_other_fields,
    run_scoring,
)
from llmcli.batch.scoring.text_files import SourceLine, TextFiles, read_text
from llmcli.errors import UserError
from llmcli.runtime.binding.contexts.pooled_context import Vector
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.scoring.embedder import NO_NORM, Embedder

if TYPE_CHECKING:
    from llmcli.batch.journal import BatchJournal
    from llmcli.model_loader.open_server_model import ServerModel
    from llmcli.ui import UI

# Only lines with scores contain these bytes (see output_line.ANSWERED_MARK).
RANKING_MARK, SCORE_MARK = b',"results":[{"index":', b',"relevance_score":'


@dataclass(frozen=True, slots=True)
class RankRequest:
    """What is ranked.

    - `out`: the output file.
    - `pooling`: "rank" for a file that does not say that it ranks; None: as the file says.
    - `query`: the query for all lines, which are documents; None: each line has a query and its
      documents.
    - `top`: number of the best documents that are written; None: all.
    - `with_documents`: whether their texts are written.
    - `field`: with a query, the field of a JSON object that has the document.
    """

    out: Path
    pooling: str | None = None
    query: str | None = None
    top: int | None = None
    with_documents: bool = False
    field: str = TEXT_FIELD

    def identity(self) -> dict[str, Any]:
        """Return what the output depends on besides the model and the input, as JSON."""
        return {
            "query": self.query,
            "top": self.top,
            "with_documents": self.with_documents,
            "field": self.field,
        }


class RankingReader:
    """Reads lines with a query and documents, and writes output lines with rankings.
    `other_models`: names of other models that lines request.
    """

    def __init__(
        self, embedder: Embedder, request: RankRequest, batch: str, settings: ServerSettings
    ) -> None:
        self._embedder, self._batch, self._settings = embedder, batch, settings
        self.other_models: set[str] = set()
        self._defaults = {
            **({"top_n": request.top} if request.top else {}),
            **({"return_documents": True} if request.with_documents else {}),
        }

    def read(self, line: SourceLine) -> LineTexts:
        """Return the pairs of a line. Raises UserError."""
        value = line.read()
        if not isinstance(value, dict):
            raise UserError(
                f'line {line.line.number}: it must be {{"query": "...", "documents": [...]}}, '
                f"not {json_type(value)}"
            )
        name = line.name(value)
        body = {key: field for key, field in value.items() if key != "custom_id"}
        if isinstance(body.get("model"), str) and body["model"] not in self._settings.names:
            self.other_models.add(body.pop("model"))
        request = RerankRequest({**self._defaults, **body}, self._settings)
        n_characters = sum(len(request.query) + len(text) for text in request.texts)
        return LineTexts(
            n_characters,
            partial(encode_pairs, self._embedder, request.query, request.texts),
            partial(self._record, line.index, name, request),
        )

    def error_record(self, line: SourceLine, error: UserError) -> bytes:
        """Return the output line of a line without a ranking."""
        return encode_line(
            {
                "id": line_id(self._batch, line.index),
                "custom_id": line.read_name(),
                "error": error_fields(line, error),
            }
        )

    def _record(
        self,
        index: int,
        name: str,
        request: RerankRequest,
        ids: list[list[int]],
        vectors: list[Vector],
    ) -> bytes:
        document = request.build_document(ids, vectors)
        answer = document if isinstance(document, dict) else {"results": document}
        return encode_line({"id": line_id(self._batch, index), "custom_id": name, **answer})


class DocumentReader:
    """Reads documents from lines. A record is a JSON object with the score of a document, or with
    an error. The output lines are made of the records at the end.
    """

    def __init__(self, embedder: Embedder, request: RankRequest, query: str) -> None:
        self._embedder, self._request, self._query = embedder, request, query
        self.other_fields: set[str] = set()

    def read(self, line: SourceLine) -> LineTexts:
        """Return the pair of the query and a line. Raises UserError."""
        name, text = read_text(line, self._request.field, self.other_fields)
        return LineTexts(
            len(self._query) + len(text),
            partial(self._encode, text),
            partial(self._record, line.index, name, text),
        )

    def error_record(self, line: SourceLine, error: UserError) -> bytes:
        """Return the record of a document without a score."""
        return encode_line(
            {
                "index": line.index,
                "custom_id": line.read_name(),
                "error": error_fields(line, error),
            }
        )

    def _encode(self, text: str) -> list[list[int]]:
        return encode_pairs(self._embedder, self._query, [text])

    def _record(
        self, index: int, name: str, text: str, ids: list[list[int]], vectors: list[Vector]
    ) -> bytes:
        return encode_line(
            {
                "index": index,
                "custom_id": name,
                "relevance_score": read_score(vectors[0]),
                "prompt_tokens": len(ids[0]),
                **({"document": {"text": text}} if self._request.with_documents else {}),
            }
        )


def write_ranking(batch: str, top: int | None, records: Sequence[bytes], output: BinaryIO) -> None:
    """Write the output lines of all documents: the best `top`, best first, and then those that have
    an error. `batch`: the batch's id; `records`: those of a DocumentReader.
    """
    scored, failed, scores = [], [], []
    for index, record in enumerate(records):
        document = json.loads(record)
        if "error" in document:
            failed.append(index)
        else:
            scored.append(index)
            scores.append(document["relevance_score"])
    best = [scored[place] for place in rank(scores)[:top]]
    for number, index in enumerate((*best, *failed)):
        line = {"id": line_id(batch, number), **json.loads(records[index])}
        output.write(encode_line(line) + b"\n")


def rerank_files(
    hosted: "ServerModel", request: RankRequest, source: TextFiles, ui: "UI", *, force: bool
) -> BatchResult:
    """Rank the documents of `source`, and write the output file. `force`: discard the work of an
    earlier run. Raises UserError.
    """
    hosted.runner.pooling = request.pooling
    embedder = hosted.runner.embedder()
    require_reranker(embedder, "add --pooling rank")
    survey = source.survey()
    if request.query is not None and not survey.count:
        raise UserError("there is no document", hint="write one document on each line")
    identity = {**model_identity(hosted, survey, "rerank"), **request.identity()}
    batch = batch_id(identity)
    reader: RankingReader | DocumentReader
    if request.query is None:
        settings = ServerSettings((hosted.name,), 0, default_sampling())
        reader = RankingReader(embedder, request, batch, settings)
        output = BatchOutput(
            "rerank",
            partial(count_failed, batch, request.out, survey.count, RANKING_MARK),
            lambda journal: journal.finish(),
        )
    else:
        reader = DocumentReader(embedder, request, request.query)
        output = _ranking_output(request, batch)
    result = run_scoring(
        hosted.runner,
        reader,
        NO_NORM,
        source,
        survey,
        BatchIdentity(identity, output),
        request.out,
        ui,
        force=force,
    )
    if isinstance(reader, DocumentReader):
        note_other_fields(reader.other_fields, ui)
    else:
        for name in sorted(reader.other_models)[:3]:
            ui.note(f"lines that name the model {name[:100]} are ranked by {hosted.name}")
    return result


def _ranking_output(request: RankRequest, batch: str) -> BatchOutput:
    """Return how the file of one ranking is written and recognized."""

    def finish(journal: "BatchJournal") -> None:
        journal.finish(partial(write_ranking, batch, request.top))

    # the number of lines is not known before: --top leaves documents out, but no errors
    return BatchOutput(
        "rerank", partial(count_failed, batch, request.out, None, SCORE_MARK), finish
    )
