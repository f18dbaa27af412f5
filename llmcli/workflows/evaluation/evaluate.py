"""Evaluation of a model on a text, alone or against a base. The scores of each group of chunks are
saved as soon as they are computed, so that an interrupted run can resume.
"""

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmcli import file_lock
from llmcli.atomic_files import make_folder, require_writable, sync_folder, write_error
from llmcli.config import has_rotated_cache
from llmcli.errors import UserError
from llmcli.runtime import model_identity
from llmcli.runtime.binding.library import llama_cpp_version
from llmcli.runtime.drafting.draft_files import vocabulary_match
from llmcli.runtime.scoring import chunk_scorer
from llmcli.workflows.evaluation.models import (
    EvaluationSide,
    both_fit,
    open_one_by_one,
    open_scorers,
    require_same_vocabulary,
    tokenize_text,
)
from quant.evaluation import base_logits, evaluate
from quant.evaluation.base_logits import BaseLogitsFile
from quant.evaluation.divergence import PositionScores, ThreadedScorer, TopLogits
from quant.evaluation.evaluate import Evaluation, TextChunks
from quant.evaluation.metrics import TextMetrics, compute_metrics, mean_with_error
from quant.record_log import RecordLog

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.ui import UI

N_COLUMNS = 5  # of the stored scores of a chunk: PositionScores; one column without a base
# options that the cached scores depend on, by their names in the record file's head
KEY_LABELS = {
    "base": "--base",
    "written": "time of its file",
    "text": "text",
    "n_ctx": "--ctx",
    "type_k": "-ctk",
    "type_v": "-ctv",
    "flash_attn": "-fa",
    "n_batch": "-b",
    "n_ubatch": "-ub",
    "gpu_layers": "-ngl",
    "placement": "options of the placement",
    "build": "build of llama.cpp",
    "rotated": "LLAMA_ATTN_ROT_DISABLE",
}


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """A request to evaluate a model, alone or against a base. The base is another model (`base`) or
    a file of saved logits (`base_logits`); at most one is set.

    `text`: None if the base-logits file contains the text. `max_chunks`: maximum number of chunks;
    None: all. `save_base`: the file for the logits of the base, or of the model if there is no
    base; None: save none. `fresh`: ignore the saved scores of an earlier run. `quiet`: print no
    note about other evaluations of the model.
    """

    model: EvaluationSide
    base: EvaluationSide | None
    base_logits: BaseLogitsFile | None
    text: str | None
    max_chunks: int | None = None
    save_base: Path | None = None
    fresh: bool = False
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The result of an evaluation.

    `tokens`: number of tokens in the text. `chunks`: number of scored chunks, each of `n_ctx`
    tokens. `resumed_chunks`: number of chunks that an earlier run had scored. `chunk_klds`: mean KL
    divergence of each chunk, for paired comparisons of two files; empty without a base.
    """

    quality: TextMetrics
    tokens: int
    n_ctx: int
    chunks: int
    resumed_chunks: int
    seconds: float
    chunk_klds: tuple[float, ...] = ()


def run_evaluation(request: EvaluationRequest, config: "Config", ui: "UI") -> EvaluationResult:
    """Evaluate a model. Finished chunks are saved, so that an interrupted run with the same request
    resumes. Raises UserError.
    """
    started_at = time.perf_counter()
    text, n_tokens = _read_text(request)
    n_chunks = text.count if request.max_chunks is None else min(request.max_chunks, text.count)
    head = _cache_key(request, text)
    path = config.cache / "evaluations" / f"{_digest(head)}.records"
    with file_lock.hold_lock(path.with_suffix(".lock"), ui, "this evaluation"):
        journal = None if request.fresh else RecordLog.resume(path)
        if journal is not None and not _is_usable(journal, head, request, text):
            journal.close()
            journal = None
        if journal is None:
            make_folder(path.parent)
            if not request.quiet:
                _note_other_evaluations(path.parent, head, ui)
            journal = RecordLog.create(path, head)
        try:
            selected = TextChunks(text.ids[:n_chunks])
            with _open_logits_file(request, selected, head, ui) as saved_logits:
                resumed = _score_missing(request, selected, journal, saved_logits, ui)
            chunk_scores = [
                _unpack_scores(journal.read(number), text.scored_count)
                for number in range(n_chunks)
            ]
        finally:
            journal.close()
    klds = tuple(float(scores.kld.mean()) for scores in chunk_scores if scores.has_base)
    return EvaluationResult(
        compute_metrics(PositionScores.join(chunk_scores)),
        n_tokens,
        text.n_ctx,
        n_chunks,
        resumed,
        time.perf_counter() - started_at,
        klds,
    )


def _score_missing(
    request: EvaluationRequest,
    text: TextChunks,
    journal: RecordLog,
    saved_logits: RecordLog | None,
    ui: "UI",
) -> int:
    """Score the chunks that are not in the journal, and append them. Return the number of chunks
    that were already in the journal.

    `saved_logits`: the file for base logits, to which the logits of the same chunks are appended;
    None: save none.
    """
    finished = (
        journal.numbers if saved_logits is None else journal.numbers & saved_logits.numbers
    ) & set(range(text.count))
    step = journal.head["at_once"]
    groups = [
        [number for number in range(start, min(start + step, text.count)) if number not in finished]
        for start in range(0, text.count, step)
    ]
    groups = [group for group in groups if group]
    if finished:
        ui.note(
            f"{len(finished)} of {text.count} chunks were computed before (--fresh recomputes them)"
        )
    if not groups:
        return len(finished)
    scores = [
        _unpack_scores(journal.read(number), text.scored_count) for number in sorted(finished)
    ]
    scorer = ThreadedScorer(journal.head["n_vocab"], request.model.options.threads or 1)
    label = f"eval {request.model.header.path.name}"
    try:
        with ui.bar(label, text.count, "chunks", len(finished)) as bar:
            for group, (group_scores, top_logits) in _score_groups(
                request, text, groups, scorer, keep=saved_logits is not None
            ):
                # written before the journal, because chunks in the journal are not computed again
                if saved_logits is not None:
                    saved_logits.append(
                        {
                            number: base_logits.pack_rows(rows)
                            for number, rows in zip(group, top_logits, strict=True)
                        }
                    )
                journal.append(
                    {
                        number: _pack_scores(chunk)
                        for number, chunk in zip(group, group_scores, strict=True)
                    }
                )
                scores += group_scores
                bar.advance(len(group))
                bar.describe(f"{label}: {_format_estimate(PositionScores.join(scores))}")
    finally:
        scorer.close()
    return len(finished)


def _score_groups(
    request: EvaluationRequest,
    text: TextChunks,
    groups: list[list[int]],
    threaded_scorer: ThreadedScorer,
    *,
    keep: bool,
) -> Iterator[tuple[list[int], tuple[list[PositionScores], list[list[TopLogits]]]]]:
    """Yield each group of chunks with its scores and, if `keep` is set, its top logits. Both models
    are open at the same time if the memory allows it; otherwise, they are opened in turn.
    """
    if request.base is None or both_fit(request.model, request.base):
        with open_scorers(request.model, request.base, max(map(len, groups))) as (model, base):
            evaluation = Evaluation(model, base, request.base_logits, text, threaded_scorer, keep)
            for group in groups:
                yield group, evaluation.score(group)
        return
    for group, scorer, base_buffer in open_one_by_one(request.model, request.base, text, groups):
        yield group, Evaluation(scorer, base_buffer, None, text, threaded_scorer, keep).score(group)


def _read_text(request: EvaluationRequest) -> tuple[TextChunks, int]:
    """Return the chunks of the text, and the number of its tokens. Raises UserError if the base has
    another vocabulary than the model, or splits the text into other tokens.
    """
    if request.text is not None:
        token_ids = tokenize_text(request.model, request.text)
        if request.base and request.base.header.path != request.model.header.path:
            require_same_vocabulary(request.model, request.base, token_ids, request.text)
        assert request.model.options.ctx_size
        return evaluate.split_text(token_ids, request.model.options.ctx_size), len(token_ids)
    assert request.base_logits
    if (
        vocabulary_match.vocabulary_hash(request.model.header)
        != request.base_logits.head["vocabulary"]
    ):
        raise UserError(
            f"{request.model.header.path.name} has another vocabulary than {request.base_logits.name}, "
            "the source of these logits",
            hint="an evaluation needs two files of one model",
        )
    chunks = request.base_logits.text()
    return chunks, chunks.ids.size


def _cache_key(request: EvaluationRequest, text: TextChunks) -> dict[str, Any]:
    """Return everything that the scores of a chunk depend on, as a JSON object."""
    options, sides = request.model.options, [side for side in (request.model, request.base) if side]
    n_vocab = request.model.n_vocab
    base = (
        model_identity.content_hash(request.base.header)
        if request.base
        else _digest(request.base_logits.head)
        if request.base_logits
        else ""
    )
    return {
        "kind": "evaluation",
        "model": model_identity.content_hash(request.model.header),
        "base": base,
        "written": [
            *(model_identity.newest_mtime_ns(side.header) for side in sides),
            *_time_stamps(request.base_logits),
        ],
        "text": hashlib.sha256(text.ids.tobytes()).hexdigest(),
        "n_ctx": text.n_ctx,
        "n_vocab": n_vocab,
        "at_once": chunk_scorer.chunks_per_pass(
            text.n_ctx, options.batch_size, n_vocab, text.count
        ),
        "type_k": options.cache_type_k,
        "type_v": options.cache_type_v,
        "flash_attn": options.flash_attn,
        "n_batch": options.batch_size,
        "n_ubatch": options.ubatch_size,
        "gpu_layers": [side.placement.gpu_layers for side in sides],
        "build": llama_cpp_version(),
        **({} if has_rotated_cache() else {"rotated": False}),
        **({"placement": options.placement_identity} if options.placement_identity else {}),
    }


def _time_stamps(base_logits: BaseLogitsFile | None) -> list[int]:
    """Return the time stamp of the base-logits file, in a list; empty without such a file. The time
    stamp reveals a small edit of the file, which the hash of its head may not show.
    """
    return [base_logits.path.stat().st_mtime_ns] if base_logits else []


def _note_other_evaluations(folder: Path, head: dict[str, Any], ui: "UI") -> None:
    """Print a note if the same model was evaluated with other options before, because those scores
    cannot be used.
    """
    for path in sorted(folder.glob("*.records"), key=lambda path: -path.stat().st_mtime):
        records = RecordLog.resume(path, write=False)
        if records is None:
            continue
        records.close()
        different_keys = [key for key in KEY_LABELS if records.head.get(key) != head.get(key)]
        # with another chunk length the tokens differ anyway
        if "n_ctx" in different_keys and "text" in different_keys:
            different_keys.remove("text")
        if records.head.get("model") == head["model"] and different_keys:
            labels = ", ".join(KEY_LABELS[key] for key in different_keys)
            ui.note(
                f"starting again: the last evaluation of this model had other values of: {labels}"
            )
            return


@contextmanager
def _open_logits_file(
    request: EvaluationRequest, text: TextChunks, head: dict[str, Any], ui: "UI"
) -> Iterator[RecordLog | None]:
    """Yield the file in which base logits are saved; None if they are not saved or already
    complete. An unfinished file is resumed if possible. The file has a temporary name until it is
    complete.

    Raises UserError.
    """
    if request.save_base is None:
        yield None
        return
    path, side = request.save_base, request.base or request.model
    require_writable(path)
    saved_head = {
        **{
            key: head[key]
            for key in ("n_ctx", "n_vocab", "at_once", "n_batch", "n_ubatch", "flash_attn", "build")
        },
        "kind": base_logits.RECORD_KIND,
        "name": side.header.path.name,
        "model": model_identity.content_hash(side.header),
        "text": hashlib.sha256(text.ids.tobytes()).hexdigest(),
        "vocabulary": vocabulary_match.vocabulary_hash(side.header),
        "type_k": side.options.cache_type_k,
        "type_v": side.options.cache_type_v,
        "chunks": text.count,
    }
    if not request.fresh and _is_complete(
        path, saved_head, model_identity.newest_mtime_ns(side.header)
    ):
        ui.note(f"{path} is up to date, made from this model and text")
        yield None
        return
    part_file = path.with_name(path.name + ".part")
    try:
        saved = None if request.fresh else RecordLog.resume(part_file)
        if saved is None or saved.head != saved_head:
            make_folder(path.parent)
            saved = RecordLog.create(part_file, saved_head)
            saved.append({base_logits.TOKENS_RECORD: text.ids.astype("<i4").tobytes()})
    except OSError as error:
        raise write_error(path, error) from None
    try:
        yield saved
    finally:
        saved.close()
    part_file.replace(path)
    sync_folder(path.parent)


def _is_complete(path: Path, head: dict[str, Any], written: int) -> bool:
    """Return whether the base-logits file has the expected head and all chunks, and is not older
    than the model. `written`: time stamp of the model in nanoseconds.
    """
    records = RecordLog.resume(path, write=False)
    if records is None:
        return False
    records.close()
    return (
        records.head == head
        and set(range(head["chunks"])) <= records.numbers
        and path.stat().st_mtime_ns >= written
    )


def _pack_scores(scores: PositionScores) -> bytes:
    columns = (
        [scores.nll, scores.base_nll, scores.kld, scores.same_top, scores.kld_error]
        if scores.has_base
        else [scores.nll]
    )
    return np.stack(columns).astype("<f8").tobytes()


def _is_usable(
    journal: RecordLog, head: dict[str, Any], request: EvaluationRequest, text: TextChunks
) -> bool:
    """Return whether a journal has the expected head, and records of the size of scores."""
    has_base = request.base is not None or request.base_logits is not None
    nbytes = 8 * text.scored_count * (N_COLUMNS if has_base else 1)
    return journal.head == head and journal.sizes <= {nbytes}


def _unpack_scores(raw: bytes, scored: int) -> PositionScores:
    columns = np.frombuffer(raw, "<f8").reshape(-1, scored)
    return PositionScores(*columns, *[evaluate.EMPTY_SCORES] * (N_COLUMNS - len(columns)))


def _format_estimate(scores: PositionScores) -> str:
    """Return the perplexity and divergence of the chunks so far as text, for the progress bar."""
    estimate = f"PPL {np.exp(mean_with_error(scores.nll).value):.4f}"
    return estimate + (f", KLD {mean_with_error(scores.kld).value:.5f}" if scores.has_base else "")


def _digest(head: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(head, sort_keys=True).encode()).hexdigest()[:40]
