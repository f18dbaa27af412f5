"""What `llmcli eval` does: a text scored chunk by chunk, each finished group of chunks on the disk.

It joins quant's arithmetic with the runtime's forward passes. What is printed is
commands/quality.py's.
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

from llmcli.catalog import store
from llmcli.catalog.partial import cannot_write, check_place, make_folder, sync_folder
from llmcli.commands.scorers import Side, both_fit, in_turn, opened, refuse_other, tokens
from llmcli.config import rotated_cache
from llmcli.errors import UserError
from llmcli.runtime import identity, scoring
from llmcli.runtime.binding.library import version
from llmcli.runtime.drafting import vocabulary
from quant import baselogits, evaluate
from quant.baselogits import BaseLogits
from quant.divergence import Lanes, Scores, Top
from quant.evaluate import Chunks, Evaluation
from quant.quality import Quality, mean, quality
from quant.records import Records

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
    """What is to be evaluated: a model, perhaps its base or what was kept of one, and how. `words`
    are the text; None where the base's file brings it along. `quiet`: not a word of other
    evaluations of the same model.
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
    """What came of it: of `tokens` in the text so many `chunks` of `n_ctx` were read, `resumed` of
    them earlier.

    `klds`: the mean divergence of each chunk, by which two files can be held against each other in
    pairs.
    """

    quality: Quality
    tokens: int
    n_ctx: int
    chunks: int
    resumed: int
    seconds: float
    klds: tuple[float, ...] = ()


def run(wish: Wish, config: "Config", ui: "UI") -> Outcome:
    """Evaluate. What is finished is kept at any Ctrl-C or kill, and the same call goes on there.
    Raises Refusal.
    """
    begun = time.perf_counter()
    text, count = _text(wish)
    some = text.count if wish.chunks is None else min(wish.chunks, text.count)
    head = _head(wish, text)
    path = config.cache / "evaluations" / f"{_digest(head)}.records"
    with store.locked(path.with_suffix(".lock"), ui, "this evaluation"):
        done = None if wish.fresh else Records.resume(path)
        if done is None or done.head != head:
            make_folder(path.parent)
            if not wish.quiet:
                _tell_others(path.parent, head, ui)
            done = Records.begin(path, head)
        try:
            part = Chunks(text.ids[:some])
            with _saving(wish, part, head, ui) as saved:
                resumed = _loop(wish, part, done, saved, ui)
            found = [_scores(done.get(number), text.scored) for number in range(some)]
        finally:
            done.close()
    klds = tuple(float(one.kld.mean()) for one in found if one.against)
    return Outcome(
        quality(Scores.join(found)),
        count,
        text.n_ctx,
        some,
        resumed,
        time.perf_counter() - begun,
        klds,
    )


def _loop(wish: Wish, text: Chunks, done: Records, saved: Records | None, ui: "UI") -> int:
    """Score what is not there yet; the number of chunks that were."""
    have = (done.numbers if saved is None else done.numbers & saved.numbers) & set(
        range(text.count)
    )
    step = done.head["at_once"]
    groups = [
        [number for number in range(start, min(start + step, text.count)) if number not in have]
        for start in range(0, text.count, step)
    ]
    groups = [group for group in groups if group]
    if have:
        ui.note(
            f"{len(have)} of {text.count} chunks were computed before (--fresh computes them anew)"
        )
    if not groups:
        return len(have)
    scores = [_scores(done.get(number), text.scored) for number in sorted(have)]
    lanes = Lanes(done.head["n_vocab"], wish.model.options.threads or 1)
    label = f"eval {wish.model.header.path.name}"
    try:
        with ui.bar(label, text.count, "chunks", len(have)) as bar:
            for group, (found, tops) in _scored(wish, text, groups, lanes, keep=saved is not None):
                if saved is not None:  # before the journal: what that has is not computed again
                    saved.put(
                        {
                            number: baselogits.pack(rows)
                            for number, rows in zip(group, tops, strict=True)
                        }
                    )
                done.put({number: _bytes(one) for number, one in zip(group, found, strict=True)})
                scores += found
                bar.advance(len(group))
                bar.describe(f"{label}: {_so_far(Scores.join(scores))}")
    finally:
        lanes.close()
    return len(have)


def _scored(
    wish: Wish, text: Chunks, groups: list[list[int]], lanes: Lanes, *, keep: bool
) -> Iterator[tuple[list[int], tuple[list[Scores], list[list[Top]]]]]:
    """Groups of chunks with their scores: both models open at once where the memory holds them,
    else in turn.
    """
    if wish.base is None or both_fit(wish.model, wish.base):
        with opened(wish.model, wish.base, max(map(len, groups))) as (model, base):
            evaluation = Evaluation(model, base, wish.kept, text, lanes, keep)
            for group in groups:
                yield group, evaluation.score(group)
        return
    for group, scorer, held in in_turn(wish.model, wish.base, text, groups):
        yield group, Evaluation(scorer, held, None, text, lanes, keep).score(group)


def _text(wish: Wish) -> tuple[Chunks, int]:
    """The whole text's chunks, and the number of its tokens. Model and base must agree on them."""
    if wish.words is not None:
        found = tokens(wish.model, wish.words)
        if wish.base and wish.base.header.path != wish.model.header.path:
            refuse_other(wish.model, wish.base, found, wish.words)
        assert wish.model.options.ctx_size
        return evaluate.chunks(found, wish.model.options.ctx_size), len(found)
    assert wish.kept
    if vocabulary.digest(wish.model.header) != wish.kept.head["vocabulary"]:
        raise UserError(
            f"{wish.model.header.path.name} has another vocabulary than {wish.kept.name}, whose logits these are",
            hint="an evaluation needs two files of one model",
        )
    text = wish.kept.text()
    return text, text.ids.size


def _head(wish: Wish, text: Chunks) -> dict[str, Any]:
    """All that the figures of a chunk depend on."""
    options, sides = wish.model.options, [side for side in (wish.model, wish.base) if side]
    n_vocab = wish.model.n_vocab
    base = (
        identity.content(wish.base.header)
        if wish.base
        else _digest(wish.kept.head)
        if wish.kept
        else ""
    )
    return {
        "kind": "evaluation",
        "model": identity.content(wish.model.header),
        "base": base,
        "written": [*(identity.written(side.header) for side in sides), *_written(wish.kept)],
        "text": hashlib.sha256(text.ids.tobytes()).hexdigest(),
        "n_ctx": text.n_ctx,
        "n_vocab": n_vocab,
        "at_once": scoring.at_once(text.n_ctx, options.batch_size, n_vocab, text.count),
        "type_k": options.cache_type_k,
        "type_v": options.cache_type_v,
        "flash_attn": options.flash_attn,
        "n_batch": options.batch_size,
        "n_ubatch": options.ubatch_size,
        "gpu_layers": [side.gpu_layers for side in sides],
        "build": version(),
        **({} if rotated_cache() else {"rotated": False}),
    }


def _written(kept: BaseLogits | None) -> list[int]:
    """When a file of base logits was: its head does not tell it from one of a base with a small
    edit.
    """
    return [kept.path.stat().st_mtime_ns] if kept else []


def _tell_others(folder: Path, head: dict[str, Any], ui: "UI") -> None:
    """Say where the same model was evaluated otherwise: none of that can be used."""
    for path in sorted(folder.glob("*.records"), key=lambda path: -path.stat().st_mtime):
        other = Records.resume(path, write=False)
        if other is None:
            continue
        other.close()
        differ = [key for key in OTHERS if other.head.get(key) != head.get(key)]
        if "n_ctx" in differ and "text" in differ:  # chunks of another length end elsewhere
            differ.remove("text")
        if other.head.get("model") == head["model"] and differ:
            words = ", another ".join(OTHERS[key] for key in differ)
            ui.note(f"begins anew: the last evaluation of this model had another {words}")
            return


@contextmanager
def _saving(wish: Wish, text: Chunks, head: dict[str, Any], ui: "UI") -> Iterator[Records | None]:
    """The file of base logits that is to be written, gone on with where it was begun; named when
    all is there.
    """
    if wish.save_base is None:
        yield None
        return
    path, side = wish.save_base, wish.base or wish.model
    check_place(path)
    words = {
        **{
            key: head[key]
            for key in ("n_ctx", "n_vocab", "at_once", "n_batch", "n_ubatch", "flash_attn", "build")
        },
        "kind": baselogits.KIND,
        "name": side.header.path.name,
        "model": identity.content(side.header),
        "text": hashlib.sha256(text.ids.tobytes()).hexdigest(),
        "vocabulary": vocabulary.digest(side.header),
        "type_k": side.options.cache_type_k,
        "type_v": side.options.cache_type_v,
        "chunks": text.count,
    }
    if not wish.fresh and _whole(path, words, identity.written(side.header)):
        ui.note(f"{path} is there already, made from this model and text")
        yield None
        return
    part = path.with_name(path.name + ".part")
    try:
        saved = None if wish.fresh else Records.resume(part)
        if saved is None or saved.head != words:
            make_folder(path.parent)
            saved = Records.begin(part, words)
            saved.put({baselogits.TOKENS: text.ids.astype("<i4").tobytes()})
    except OSError as error:
        raise cannot_write(path, error) from None
    try:
        yield saved
    finally:
        saved.close()
    part.replace(path)
    sync_folder(path.parent)


def _whole(path: Path, words: dict[str, Any], written: int) -> bool:
    """Whether a file of base logits has this head and all chunks, and is younger than the model."""
    found = Records.resume(path, write=False)
    if found is None:
        return False
    found.close()
    return (
        found.head == words
        and set(range(words["chunks"])) <= found.numbers
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
    """The running estimate."""
    told = f"PPL {np.exp(mean(scores.nll).value):.4f}"
    return told + (f", KLD {mean(scores.kld).value:.5f}" if scores.against else "")


def _digest(head: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(head, sort_keys=True).encode()).hexdigest()[:40]
