"""What one model expects after a token, held against what another expects: rows of logits become
figures.

The definitions are llama-perplexity's (tools/perplexity/perplexity.cpp). Logits are float32; sums
are taken in float32 over 256 values and in float64 above. It knows rows, no chunks and no files.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from quant.errors import Refusal

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
T = TypeVar("T")
FLOOR = -16.0  # what the base gives less than e^-16 does not count: perplexity.cpp's rule
KEPT, DRAWN = 256, 64  # tokens of a row that a file of base logits keeps, and draws from the rest
REST = 1e-6  # mass of a rest that is not worth a draw
SPAN = 1 << 15  # values of a row that are worked on at a time: they stay in the nearest caches
PIECE = 256  # values whose sum stays float32


@dataclass(frozen=True, slots=True)
class Scores:
    """The scored positions of a text, float64 [positions] each: −log p of the token that came, by
    the model and by the base, the divergence from the base, whether both would have said the same
    (1 or 0), and the standard error of the divergence where a part of it was drawn. Without a base
    all but the first are empty.
    """

    nll: F64
    base_nll: F64
    kld: F64
    same: F64
    doubt: F64

    @property
    def against(self) -> bool:
        """Whether there was a base."""
        return len(self.base_nll) > 0

    @classmethod
    def join(cls, parts: "list[Scores]") -> Self:
        """All positions of all parts, in order."""
        return cls(
            *(np.concatenate([getattr(part, one.name) for part in parts]) for one in fields(cls))
        )


@dataclass(frozen=True, slots=True)
class Top:
    """What is kept of a base's row: its likeliest tokens, the likeliest first, and their
    log-probabilities; −log p of the token that came; the mass of all tokens that are not kept, and
    some of them, drawn by their probabilities.
    """

    ids: NDArray[np.uint32]
    logp: F32
    nll: float
    rest: float
    drawn: NDArray[np.uint32]
    drawn_logp: F32


class Lane:
    """The arithmetic of one thread, with its buffers: no row allocates."""

    def __init__(self, n_vocab: int) -> None:
        self.n_vocab = n_vocab
        ends = [(at, min(at + SPAN, n_vocab)) for at in range(0, n_vocab, SPAN)]
        self._spans = [(at, end, -(-(end - at) // PIECE) * PIECE) for at, end in ends]
        self._scratch = np.zeros(SPAN, np.float32)
        self._weight = np.zeros(n_vocab + PIECE, np.float32)[
            : self._spans[-1][0] + self._spans[-1][2]
        ]  # ends in 0
        self._ones = np.ones((PIECE, 1), np.float32)

    def sum(self, row: F32, *, keep: bool = True) -> tuple[float, int, float]:
        """log Σ exp of a row, its largest value's place, and Σ exp(row − largest); exp(row −
        largest) is kept.
        """
        best = int(row.argmax())
        peak, total = row[best], 0.0
        for at, end, room in self._spans:
            some = end - at
            part = self._scratch[:some]
            np.subtract(row[at:end], peak, out=part)
            out = self._weight[at : at + room] if keep else self._scratch[:room]
            np.exp(part, out=out[:some])
            out[some:] = 0
            total += self._total(out)
        return float(peak) + math.log(total) if total > 0 else math.nan, best, total

    def _total(self, values: F32) -> float:
        return float((values.reshape(-1, 1, PIECE) @ self._ones).sum(dtype=np.float64))

    def plain(self, row: F32, token: int) -> float:
        """−log p of the token that came."""
        return self.sum(row, keep=False)[0] - float(row[token])

    def against(self, row: F32, base: F32, token: int) -> tuple[float, float, float, float]:
        """−log p by the model and by the base, the divergence, and whether both have the same
        likeliest token.
        """
        norm, best, _ = self.sum(row, keep=False)
        base_norm, base_best, total = self.sum(base)
        floor, apart, mass = np.float32(base_norm + FLOOR), 0.0, 0.0
        for at, end, room in self._spans:
            some = end - at
            weight, part = self._weight[at : at + room], self._scratch[:room]
            np.multiply(weight[:some], base[at:end] > floor, out=weight[:some])
            np.subtract(base[at:end], row[at:end], out=part[:some])
            part[some:] = 0
            apart += float(
                (weight.reshape(-1, 1, PIECE) @ part.reshape(-1, PIECE, 1)).sum(dtype=np.float64)
            )
            mass += self._total(weight)
        kld = (apart - mass * (base_norm - norm)) / total
        if not math.isfinite(kld):  # logits of −inf on both sides: only what counts
            counts = np.flatnonzero(base > floor)
            logp = base[counts] - np.float64(base_norm)
            kld = float((np.exp(logp) * (logp - (row[counts] - np.float64(norm)))).sum())
        return (
            norm - float(row[token]),
            base_norm - float(base[token]),
            kld,
            float(best == base_best),
        )

    def kept(self, row: F32, top: Top, token: int) -> tuple[float, float, float, float, float]:
        """As `against`, from what was kept of the base's row; the last value is the divergence's
        standard error.

        Of the rest its mass P is known, the model's mass Q for the same tokens too: P log(P/Q) is
        exact. What is left is P times the mean over the rest of e^d − 1 − d, d = log(q/Q) −
        log(p/P): never negative, small of second order, and taken from the tokens drawn. Tokens
        below e^-16 count here.
        """
        norm, best, _ = self.sum(row, keep=False)
        logq = row[top.ids] - np.float64(norm)
        kld, doubt = float((np.exp(top.logp, dtype=np.float64) * (top.logp - logq)).sum()), 0.0
        if len(top.drawn):
            left = max(1.0 - float(np.exp(logq).sum()), 1e-9)
            apart = row[top.drawn] - np.float64(norm) - top.drawn_logp + math.log(top.rest / left)
            found = np.exp(apart) - 1 - apart
            kld += top.rest * (math.log(top.rest / left) + float(found.mean()))
            doubt = top.rest * float(found.std()) / math.sqrt(len(found) - 1)
        return norm - float(row[token]), top.nll, kld, float(best == int(top.ids[0])), doubt

    def top(self, row: F32, token: int, seed: int) -> Top:
        """What is kept of a row: `KEPT` tokens, fewer where they hold all but `REST`; and draws
        from the rest, at even distances of its mass from a beginning that `seed` tells.
        """
        norm, best, total = self.sum(row)
        weight = self._weight[: self.n_vocab]
        count = min(KEPT, self.n_vocab)
        ids = np.argpartition(row, self.n_vocab - count)[self.n_vocab - count :]
        ids = ids[np.lexsort((ids, -row[ids]))]
        mass = np.cumsum(weight[ids], dtype=np.float64) / total
        ids = ids[: int(np.searchsorted(mass, 1 - REST)) + 1]
        logp = (row[ids] - np.float64(norm)).astype(np.float32)
        weight[ids] = 0
        sums = np.cumsum(weight, dtype=np.float64)
        rest, drawn = float(sums[-1]) / total, np.empty(0, np.int64)
        if rest > REST:
            places = (np.random.default_rng(seed).random() + np.arange(DRAWN)) / DRAWN
            drawn = np.searchsorted(sums, places * sums[-1], side="right")
        assert best == ids[0] or row[best] == row[ids[0]], (best, ids[0])
        drawn_logp = (row[drawn] - np.float64(norm)).astype(np.float32)
        return Top(
            ids.astype(np.uint32),
            logp,
            norm - float(row[token]),
            rest,
            drawn.astype(np.uint32),
            drawn_logp,
        )


class Lanes:
    """Several threads that share the rows of a block; numpy lets them run at once."""

    def __init__(self, n_vocab: int, threads: int) -> None:
        self._lanes = [Lane(n_vocab) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="score")

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def map(self, count: int, one: Callable[[Lane, int], T]) -> list[T]:
        """`one(lane, i)` for every i below `count`, in order."""
        step = -(-count // len(self._lanes))

        def part(number: int) -> list[T]:
            lane = self._lanes[number]
            with np.errstate(
                invalid="ignore", over="ignore"
            ):  # what is no number is told by `sound`
                return [one(lane, i) for i in range(number * step, min((number + 1) * step, count))]

        return [row for rows in self._pool.map(part, range(len(self._lanes))) for row in rows]


def sound(scores: Scores, chunk: int) -> Scores:
    """The same; raises Refusal where a model gave something that is no number."""
    for name, values in (("model", scores.nll), ("base", scores.base_nll)):
        if not np.isfinite(values).all():
            raise Refusal(
                f"the {name} gave logits that are no numbers (NaN or infinity) in chunk {chunk + 1}",
                hint="the file may be damaged: llmcli diff it against its source; or try -ctk f16 -ctv f16 -fa off",
            )
    if not np.isfinite(scores.kld).all():
        raise Refusal(
            f"the divergence is infinite in chunk {chunk + 1}: the model rules out a token that the base expects",
            hint="the two files do not belong together, or one is damaged",
        )
    return scores
