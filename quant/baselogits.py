"""What a base expects, kept in a file: of each scored position the likeliest tokens, and the mass
of the rest.

Where llama-perplexity keeps two bytes for every word of the vocabulary (98 KB a position of
SmolLM2, 524 KB of Gemma 3), this keeps eight bytes for each of 256 tokens, and for 64 drawn from
the rest. Perplexities, Δp and same-top lose nothing. How the rest was dealt out is lost: its part
of the divergence is taken from the draws (`Lane.kept`), and the standard error that this adds is
told.
"""

from pathlib import Path

import numpy as np

from quant.divergence import Top
from quant.errors import Refusal
from quant.evaluate import SHORTEST, Chunks
from quant.records import Records

KIND = "base logits"
TOKENS = 2**32 - 1  # the record of the text's tokens
NUMBERS = ("n_ctx", "n_vocab", "chunks")
WORDS = ("text", "vocabulary", "model", "name")


def pack(tops: list[Top]) -> bytes:
    """Numbers of tokens kept and drawn u32, −log p of what came f64, rests f64, then all ids u32
    and log-probabilities f32, for each position what is kept and what is drawn.
    """
    return b"".join(
        (
            np.array(
                [[len(top.ids) for top in tops], [len(top.drawn) for top in tops]], "<u4"
            ).tobytes(),
            np.array([[top.nll for top in tops], [top.rest for top in tops]], "<f8").tobytes(),
            np.concatenate([ids for top in tops for ids in (top.ids, top.drawn)])
            .astype("<u4")
            .tobytes(),
            np.concatenate([logp for top in tops for logp in (top.logp, top.drawn_logp)])
            .astype("<f4")
            .tobytes(),
        )
    )


def unpack(raw: bytes, scored: int, n_vocab: int) -> list[Top] | None:
    """The rows of one chunk; None where the bytes cannot be such."""
    if len(raw) < 24 * scored:
        return None
    counts = np.frombuffer(raw, "<u4", 2 * scored).astype(np.int64).reshape(2, scored)
    total = int(counts.sum())
    if counts[0].min() < 1 or (counts[1] == 1).any() or len(raw) != 24 * scored + 8 * total:
        return None
    nll, rest = np.frombuffer(raw, "<f8", 2 * scored, 8 * scored).reshape(2, scored)
    ids = np.frombuffer(raw, "<u4", total, 24 * scored)
    logp = np.frombuffer(raw, "<f4", total, 24 * scored + 4 * total)
    if int(ids.max()) >= n_vocab or not (rest[counts[1] > 0] > 0).all():
        return None
    if not all(np.isfinite(values).all() for values in (nll, rest, logp)):
        return None
    ends = np.cumsum(counts.T)
    cuts = [*zip(np.split(ids, ends[:-1]), np.split(logp, ends[:-1]), strict=True)]
    return [
        Top(kept[0], kept[1], float(nll[i]), float(rest[i]), drawn[0], drawn[1])
        for i, (kept, drawn) in enumerate(zip(cuts[::2], cuts[1::2], strict=True))
    ]


class BaseLogits:
    """A finished file of base logits, open for reading. Fits evaluate.Kept."""

    def __init__(self, path: Path, records: Records) -> None:
        head = records.head
        self.path, self._records, self.head = path, records, head
        self.n_vocab, self.n_ctx, self.name = (
            int(head["n_vocab"]),
            int(head["n_ctx"]),
            str(head["name"]),
        )

    def text(self) -> Chunks:
        """The text that was read."""
        raw = self._records.get(TOKENS)
        count = self.head["chunks"]
        if len(raw) != 4 * count * self.n_ctx:
            raise self._damaged("its text")
        ids = np.frombuffer(raw, "<i4").reshape(count, self.n_ctx)
        if int(ids.min()) < 0 or int(ids.max()) >= self.n_vocab:
            raise self._damaged("its text")
        return Chunks(ids)

    def rows(self, chunk: int) -> list[Top]:
        """The scored positions of one chunk; raises Refusal where its bytes are damaged."""
        found = unpack(self._records.get(chunk), self.n_ctx - 1 - self.n_ctx // 2, self.n_vocab)
        if found is None:
            raise self._damaged(f"chunk {chunk + 1}")
        return found

    def close(self) -> None:
        """Close the file."""
        self._records.close()

    def _damaged(self, where: str) -> Refusal:
        return Refusal(f"{self.path} is damaged in {where}", hint="make it again with --save-base")


def recognised(path: Path) -> bool:
    """Whether a file begins as ours do."""
    try:
        with path.open("rb") as stream:
            return stream.read(64).startswith(b'{"format": "llmcli records')
    except OSError:
        return False


def load(path: Path) -> BaseLogits:
    """Open a file of base logits; raises Refusal where it is none, or not whole."""
    again = "llmcli eval BASE --save-base FILE makes one"
    if not path.is_file():
        raise Refusal(f"there is no file {path}", hint=again)
    records = Records.resume(path, write=False)
    if records is None or not _sane(records.head):
        if records is not None:
            records.close()
        raise Refusal(f"{path} holds no base logits", hint=again)
    # counted first: a head may claim any number
    whole = records.head["chunks"] < len(records.numbers)
    if not (whole and {TOKENS, *range(records.head["chunks"])} <= records.numbers):
        records.close()
        raise Refusal(f"{path} is damaged or was not finished", hint=again)
    return BaseLogits(path, records)


def _sane(head: dict[str, object]) -> bool:
    """Whether a head says what it must: a file is anybody's."""
    numbers = [head.get(name) for name in NUMBERS]
    return (
        head.get("kind") == KIND
        and all(
            isinstance(one, int) and not isinstance(one, bool) and 0 < one < 2**31
            for one in numbers
        )
        and all(isinstance(head.get(name), str) for name in WORDS)
        and isinstance(head["n_ctx"], int)
        and head["n_ctx"] >= SHORTEST
        and isinstance(head["chunks"], int)
        and head["chunks"] < TOKENS
    )
