"""A compact file of a base model's logits. For each scored position of a text it stores the
likeliest tokens and the total probability of all other tokens.

llama-perplexity stores two bytes for every token of the vocabulary. This file stores eight bytes
for each of the 256 likeliest tokens, and for each of 64 tokens drawn from the others. Perplexity,
Δp and top-1 agreement computed from it are exact. The file does not say how the remaining
probability is distributed, so its part of the divergence is estimated from the drawn tokens
(RowScorer.compare_to_top), and the standard error of the estimate is reported.
"""

from pathlib import Path

import numpy as np

from quant.errors import UserError
from quant.evaluation.divergence import TopLogits
from quant.evaluation.evaluate import MIN_CHUNK_TOKENS, TextChunks
from quant.record_log import RecordLog

RECORD_KIND = "base logits"
TOKENS_RECORD = 2**32 - 1  # the record with the text's tokens has this number
NUMBER_KEYS = ("n_ctx", "n_vocab", "chunks")
TEXT_KEYS = ("text", "vocabulary", "model", "name")


def pack_rows(tops: list[TopLogits]) -> bytes:
    """Encode the base's predictions at several positions as bytes. The inverse is unpack_rows().

    The fields follow one another, each over all positions: the number of likeliest tokens (u32),
    the number of drawn tokens (u32), −log p of the next token (f64), the total probability of all
    tokens but the likeliest (f64), the token ids (u32), and their log-probabilities (f32). The ids
    and log-probabilities of a position are those of its likeliest tokens, then those of its drawn
    tokens.
    """
    return b"".join(
        (
            np.array(
                [[len(top.ids) for top in tops], [len(top.drawn) for top in tops]], "<u4"
            ).tobytes(),
            np.array([[top.nll for top in tops], [top.rest_mass for top in tops]], "<f8").tobytes(),
            np.concatenate([ids for top in tops for ids in (top.ids, top.drawn)])
            .astype("<u4")
            .tobytes(),
            np.concatenate([logp for top in tops for logp in (top.logp, top.drawn_logp)])
            .astype("<f4")
            .tobytes(),
        )
    )


def unpack_rows(raw: bytes, scored: int, n_vocab: int) -> list[TopLogits] | None:
    """Decode the base's predictions in one chunk, which has `scored` scored positions. Return None
    if the bytes are not valid.
    """
    if len(raw) < 24 * scored:
        return None
    counts = np.frombuffer(raw, "<u4", 2 * scored).astype(np.int64).reshape(2, scored)
    total = int(counts.sum())
    if counts[0].min() < 1 or (counts[1] == 1).any() or len(raw) != 24 * scored + 8 * total:
        return None
    nll, rest_masses = np.frombuffer(raw, "<f8", 2 * scored, 8 * scored).reshape(2, scored)
    ids = np.frombuffer(raw, "<u4", total, 24 * scored)
    logp = np.frombuffer(raw, "<f4", total, 24 * scored + 4 * total)
    if int(ids.max()) >= n_vocab or not (rest_masses[counts[1] > 0] > 0).all():
        return None
    if not all(np.isfinite(values).all() for values in (nll, rest_masses, logp)):
        return None
    ends = np.cumsum(counts.T)
    token_lists = [*zip(np.split(ids, ends[:-1]), np.split(logp, ends[:-1]), strict=True)]
    return [
        TopLogits(stored[0], stored[1], float(nll[i]), float(rest_masses[i]), drawn[0], drawn[1])
        for i, (stored, drawn) in enumerate(zip(token_lists[::2], token_lists[1::2], strict=True))
    ]


class BaseLogitsFile:
    """A complete file of base logits, open for reading. Implements the protocol
    evaluate.BaseLogits.
    """

    def __init__(self, path: Path, records: RecordLog) -> None:
        head = records.head
        self.path, self._records, self.head = path, records, head
        self.n_vocab, self.n_ctx, self.name = (
            int(head["n_vocab"]),
            int(head["n_ctx"]),
            str(head["name"]),
        )

    def text(self) -> TextChunks:
        """Return the chunks of tokens that the base model read. Raises UserError if they are
        damaged.
        """
        raw = self._records.read(TOKENS_RECORD)
        count = self.head["chunks"]
        if len(raw) != 4 * count * self.n_ctx:
            raise self._damaged("its text")
        ids = np.frombuffer(raw, "<i4").reshape(count, self.n_ctx)
        if int(ids.min()) < 0 or int(ids.max()) >= self.n_vocab:
            raise self._damaged("its text")
        return TextChunks(ids)

    def rows(self, chunk: int) -> list[TopLogits]:
        """Return the base's prediction at each scored position of a chunk. Raises UserError if the
        data is damaged.
        """
        rows = unpack_rows(
            self._records.read(chunk), self.n_ctx - 1 - self.n_ctx // 2, self.n_vocab
        )
        if rows is None:
            raise self._damaged(f"chunk {chunk + 1}")
        return rows

    def close(self) -> None:
        """Close the file."""
        self._records.close()

    def _damaged(self, where: str) -> UserError:
        return UserError(
            f"{self.path} is damaged in {where}", hint="write it again with --save-base"
        )


def is_base_logits(path: Path) -> bool:
    """Return whether a file begins like a file of base logits. Nothing else is checked, and a
    missing file gives False.
    """
    try:
        with path.open("rb") as stream:
            return stream.read(64).startswith(b'{"format": "llmcli records')
    except OSError:
        return False


def load_base_logits(path: Path) -> BaseLogitsFile:
    """Open a file of base logits. Raises UserError if the file is missing or incomplete, or
    contains something else.
    """
    remake = "llmcli eval BASE --save-base FILE writes one"
    if not path.is_file():
        raise UserError(f"there is no file {path}", hint=remake)
    records = RecordLog.resume(path, write=False)
    if records is None or not _is_valid(records.head):
        if records is not None:
            records.close()
        raise UserError(f"{path} contains no base logits", hint=remake)
    # counted first, because a hostile header may claim so many chunks that the set fills the memory
    has_enough = records.head["chunks"] < len(records.numbers)
    if not (has_enough and {TOKENS_RECORD, *range(records.head["chunks"])} <= records.numbers):
        records.close()
        raise UserError(f"{path} is damaged or was not finished", hint=remake)
    return BaseLogitsFile(path, records)


def _is_valid(head: dict[str, object]) -> bool:
    """Return whether the first line of a file describes base logits with plausible numbers. It is
    checked because the file is untrusted.
    """
    numbers = [head.get(name) for name in NUMBER_KEYS]
    return (
        head.get("kind") == RECORD_KIND
        and all(
            isinstance(number, int) and not isinstance(number, bool) and 0 < number < 2**31
            for number in numbers
        )
        and all(isinstance(head.get(name), str) for name in TEXT_KEYS)
        and isinstance(head["n_ctx"], int)
        and head["n_ctx"] >= MIN_CHUNK_TOKENS
        and isinstance(head["chunks"], int)
        and head["chunks"] < TOKENS_RECORD
    )
