"""Evaluation: scores a text chunk by chunk and saves each finished group of chunks."""

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
from llmcli.atomic_files import cannot_write, check_place, make_folder, sync_folder
from llmcli.config import rotated_cache
from llmcli.errors import UserError
from llmcli.runtime import model_identity
from llmcli.runtime.binding.library import version
from llmcli.runtime.drafting import vocabulary_match
from llmcli.runtime.scoring import chunk_scorer
from llmcli.workflows.evaluation.models import Side, both_fit, in_turn, opened, refuse_other, tokens
from quant.evaluation import base_logits, evaluate
from quant.evaluation.base_logits import BaseLogits
from quant.evaluation.divergence import Lanes, Scores, Top
from quant.evaluation.evaluate import Chunks, Evaluation
from quant.evaluation.metrics import Quality, mean, quality
from quant.record_log import Records

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.ui import UI

OTHERS = {
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
    "build": "build of llama.cpp",
    "rotated": "LLAMA_ATTN_ROT_DISABLE",
}


@dataclass(frozen=True, slots=True)
class Wish:
    """What to evaluate: a model, optionally its base or saved base logits, and how.

    `text` is None if the file of base logits contains it. `quiet`: do not mention other evaluations
    of the same model.
    """

    model: Side
    base: Side | None
    kept: BaseLogits | None
    words: str | None
    chunks: int | None = None
    save_base: Path | None = None
    fresh: bool = False
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an evaluation.

    `tokens`: length of the text; `chunks`: scored chunks of `n_ctx` tokens; `resumed_chunks`: those
    that an earlier run had scored; `chunk_klds`: mean divergence of each chunk, for paired
    comparisons of two files.
    """

    quality: Quality
    tokens: int
    n_ctx: int
    chunks: int
    resumed: int
    seconds: float
    klds: tuple[float, ...] = ()


def run(request: Wish, config: "Config", ui: "UI") -> Outcome:
    """Evaluate; finished chunks survive an interruption, and the same call resumes from them.

    Raises UserError.
    """
    started_at = time.perf_counter()
    text, n_tokens = _read_text(request)
    n_chunks = text.count if request.chunks is None else min(request.chunks, text.count)
    head = _cache_key(request, text)
    path = config.cache / "evaluations" / f"{_digest(head)}.records"
    with file_lock.locked(path.with_suffix(".lock"), ui, "this evaluation"):
        journal = None if request.fresh else Records.resume(path)
        if journal is None or journal.head != head:
            make_folder(path.parent)
            if not request.quiet:
                _note_other_evaluations(path.parent, head, ui)
            journal = Records.begin(path, head)
        try:
            selected = Chunks(text.ids[:n_chunks])
            with _saving(request, selected, head, ui) as saved_logits:
                resumed = _score_missing(request, selected, journal, saved_logits, ui)
            chunk_scores = [_scores(journal.get(number), text.scored) for number in range(n_chunks)]
        finally:
            journal.close()
    klds = tuple(float(scores.kld.mean()) for scores in chunk_scores if scores.against)
    return Outcome(
        quality(Scores.join(chunk_scores)),
        n_tokens,
        text.n_ctx,
        n_chunks,
        resumed,
        time.perf_counter() - started_at,
        klds,
    )


def _score_missing(
    request: Wish, text: Chunks, done: Records, saved: Records | None, ui: "UI"
) -> int:
    """Score the missing chunks; return the number of chunks that were present."""
    present = (done.numbers if saved is None else done.numbers & saved.numbers) & set(
        range(text.count)
    )
    step = done.head["at_once"]
    groups = [
        [number for number in range(start, min(start + step, text.count)) if number not in present]
        for start in range(0, text.count, step)
    ]
    groups = [group for group in groups if group]
    if present:
        ui.note(
            f"{len(present)} of {text.count} chunks were computed before (--fresh recomputes them)"
        )
    if not groups:
        return len(present)
    scores = [_scores(done.get(number), text.scored) for number in sorted(present)]
    lanes = Lanes(done.head["n_vocab"], request.model.options.threads or 1)
    label = f"eval {request.model.header.path.name}"
    try:
        with ui.bar(label, text.count, "chunks", len(present)) as bar:
            for group, (group_scores, tops) in _score_groups(
                request, text, groups, lanes, keep=saved is not None
            ):
                # before the journal, because chunks in the journal are not computed again
                if saved is not None:
                    saved.put(
                        {
                            number: base_logits.pack(rows)
                            for number, rows in zip(group, tops, strict=True)
                        }
                    )
                done.put(
                    {
                        number: _bytes(chunk)
                        for number, chunk in zip(group, group_scores, strict=True)
                    }
                )
                scores += group_scores
                bar.advance(len(group))
                bar.describe(f"{label}: {_so_far(Scores.join(scores))}")
    finally:
        lanes.close()
    return len(present)


def _score_groups(
    request: Wish, text: Chunks, groups: list[list[int]], lanes: Lanes, *, keep: bool
) -> Iterator[tuple[list[int], tuple[list[Scores], list[list[Top]]]]]:
    """Yield groups of chunks with their scores; the models are opened together if memory allows,
    else in turn.
    """
    if request.base is None or both_fit(request.model, request.base):
        with opened(request.model, request.base, max(map(len, groups))) as (model, base):
            evaluation = Evaluation(model, base, request.kept, text, lanes, keep)
            for group in groups:
                yield group, evaluation.score(group)
        return
    for group, scorer, held in in_turn(request.model, request.base, text, groups):
        yield group, Evaluation(scorer, held, None, text, lanes, keep).score(group)


def _read_text(request: Wish) -> tuple[Chunks, int]:
    """Return the chunks of the text and its number of tokens; raises UserError if model and base
    disagree.
    """
    if request.words is not None:
        token_ids = tokens(request.model, request.words)
        if request.base and request.base.header.path != request.model.header.path:
            refuse_other(request.model, request.base, token_ids, request.words)
        assert request.model.options.ctx_size
        return evaluate.chunks(token_ids, request.model.options.ctx_size), len(token_ids)
    assert request.kept
    if vocabulary_match.digest(request.model.header) != request.kept.head["vocabulary"]:
        raise UserError(
            f"{request.model.header.path.name} has another vocabulary than {request.kept.name}, "
            "the source of these logits",
            hint="an evaluation needs two files of one model",
        )
    chunks = request.kept.text()
    return chunks, chunks.ids.size


def _cache_key(request: Wish, text: Chunks) -> dict[str, Any]:
    """Return everything that the scores of a chunk depend on."""
    options, sides = request.model.options, [side for side in (request.model, request.base) if side]
    n_vocab = request.model.n_vocab
    base = (
        model_identity.content(request.base.header)
        if request.base
        else _digest(request.kept.head)
        if request.kept
        else ""
    )
    return {
        "kind": "evaluation",
        "model": model_identity.content(request.model.header),
        "base": base,
        "written": [
            *(model_identity.written(side.header) for side in sides),
            *_time_stamps(request.kept),
        ],
        "text": hashlib.sha256(text.ids.tobytes()).hexdigest(),
        "n_ctx": text.n_ctx,
        "n_vocab": n_vocab,
        "at_once": chunk_scorer.at_once(text.n_ctx, options.batch_size, n_vocab, text.count),
        "type_k": options.cache_type_k,
        "type_v": options.cache_type_v,
        "flash_attn": options.flash_attn,
        "n_batch": options.batch_size,
        "n_ubatch": options.ubatch_size,
        "gpu_layers": [side.gpu_layers for side in sides],
        "build": version(),
        **({} if rotated_cache() else {"rotated": False}),
    }


def _time_stamps(kept: BaseLogits | None) -> list[int]:
    """Return the time stamp of the base logits; their head may miss a small edit of the base."""
    return [kept.path.stat().st_mtime_ns] if kept else []


def _note_other_evaluations(folder: Path, head: dict[str, Any], ui: "UI") -> None:
    """Print a note if the same model was evaluated with other options, whose results cannot be
    used.
    """
    for path in sorted(folder.glob("*.records"), key=lambda path: -path.stat().st_mtime):
        records = Records.resume(path, write=False)
        if records is None:
            continue
        records.close()
        differ = [key for key in OTHERS if records.head.get(key) != head.get(key)]
        if "n_ctx" in differ and "text" in differ:  # chunks of another length contain other tokens
            differ.remove("text")
        if records.head.get("model") == head["model"] and differ:
            labels = ", ".join(OTHERS[key] for key in differ)
            ui.note(
                f"starting again: the last evaluation of this model had other values of: {labels}"
            )
            return


@contextmanager
def _saving(
    request: Wish, text: Chunks, head: dict[str, Any], ui: "UI"
) -> Iterator[Records | None]:
    """Yield the file for base logits, resumed if possible; it gets its final name when it is
    complete.

    Raises UserError.
    """
    if request.save_base is None:
        yield None
        return
    path, side = request.save_base, request.base or request.model
    check_place(path)
    saved_head = {
        **{
            key: head[key]
            for key in ("n_ctx", "n_vocab", "at_once", "n_batch", "n_ubatch", "flash_attn", "build")
        },
        "kind": base_logits.KIND,
        "name": side.header.path.name,
        "model": model_identity.content(side.header),
        "text": hashlib.sha256(text.ids.tobytes()).hexdigest(),
        "vocabulary": vocabulary_match.digest(side.header),
        "type_k": side.options.cache_type_k,
        "type_v": side.options.cache_type_v,
        "chunks": text.count,
    }
    if not request.fresh and _is_complete(path, saved_head, model_identity.written(side.header)):
        ui.note(f"{path} is up to date, made from this model and text")
        yield None
        return
    part_file = path.with_name(path.name + ".part")
    try:
        saved = None if request.fresh else Records.resume(part_file)
        if saved is None or saved.head != saved_head:
            make_folder(path.parent)
            saved = Records.begin(part_file, saved_head)
            saved.put({base_logits.TOKENS: text.ids.astype("<i4").tobytes()})
    except OSError as error:
        raise cannot_write(path, error) from None
    try:
        yield saved
    finally:
        saved.close()
    part_file.replace(path)
    sync_folder(path.parent)


def _is_complete(path: Path, words: dict[str, Any], written: int) -> bool:
    """Return whether a file of base logits has this head and all chunks, and is newer than the
    model.
    """
    records = Records.resume(path, write=False)
    if records is None:
        return False
    records.close()
    return (
        records.head == words
        and set(range(words["chunks"])) <= records.numbers
        and path.stat().st_mtime_ns >= written
    )


def _bytes(scores: Scores) -> bytes:
    columns = (
        [scores.nll, scores.base_nll, scores.kld, scores.same, scores.doubt]
        if scores.against
        else [scores.nll]
    )
    return np.stack(columns).astype("<f8").tobytes()


def _scores(raw: bytes, scored: int) -> Scores:
    columns = np.frombuffer(raw, "<f8").reshape(-1, scored)
    return Scores(*columns, *[evaluate.NOTHING] * (5 - len(columns)))


def _so_far(scores: Scores) -> str:
    """Format the running estimate."""
    estimate = f"PPL {np.exp(mean(scores.nll).value):.4f}"
    return estimate + (f", KLD {mean(scores.kld).value:.5f}" if scores.against else "")


def _digest(head: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(head, sort_keys=True).encode()).hexdigest()[:40]
