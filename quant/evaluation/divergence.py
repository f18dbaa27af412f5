"""Comparison of two models' predictions. The logits of a position become log-likelihoods,
divergences and top-1 agreement.

The definitions are llama-perplexity's (tools/perplexity/perplexity.cpp). Logits are float32. Sums
are float32 within groups of 256 values, and float64 over these groups.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from quant.errors import UserError

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
T = TypeVar("T")
# As in perplexity.cpp, a token counts only if its log-probability in the base is above this.
MIN_LOG_PROBABILITY = -16.0
# For each position, a file of base logits stores this many of the likeliest tokens, and this many
# tokens that are drawn from the others.
TOP_TOKENS, DRAWN_TOKENS = 256, 64
# No tokens are drawn if the tokens that are not stored have less probability than this in total.
MIN_REST_MASS = 1e-6
# number of logits that are processed at a time, so that they stay in the CPU's nearest caches
SPAN_VALUES = 1 << 15
F32_SUM_VALUES = 256  # number of values that are summed in float32


@dataclass(frozen=True, slots=True)
class PositionScores:
    """The scores of all scored positions of a text, float64 [positions] each.

    `nll` and `base_nll` are −log p of the next token, predicted by the model and by the base. `kld`
    is the divergence of the model from the base. `kld_error` is its standard error if a part of it
    was estimated from drawn tokens, else 0. `same_top` is 1 where model and base have the same
    likeliest token, else 0. Without a base, all fields except `nll` are empty.
    """

    nll: F64
    base_nll: F64
    kld: F64
    same_top: F64
    kld_error: F64

    @property
    def has_base(self) -> bool:
        """Whether the model was compared with a base."""
        return len(self.base_nll) > 0

    @classmethod
    def join(cls, scores: "list[PositionScores]") -> Self:
        """Return the scores of several texts or chunks as one, with the positions in order."""
        return cls(
            *(
                np.concatenate([getattr(score, field.name) for score in scores])
                for field in fields(cls)
            )
        )


@dataclass(frozen=True, slots=True)
class TopLogits:
    """The base's prediction at one position, as it is stored in a file of base logits.

    `ids` are the likeliest tokens in descending order, and `logp` their log-probabilities. `nll` is
    −log p of the next token. `rest_mass` is the total probability of all tokens that are not in
    `ids`. `drawn` are some of these other tokens, drawn in proportion to their probabilities, and
    `drawn_logp` are their log-probabilities.
    """

    ids: NDArray[np.uint32]
    logp: F32
    nll: float
    rest_mass: float
    drawn: NDArray[np.uint32]
    drawn_logp: F32


class RowScorer:
    """Scores rows of logits in one thread. A row is the logits of one position, float32 [n_vocab].
    Buffers are reused, so that scoring a row allocates no large memory.
    """

    def __init__(self, n_vocab: int) -> None:
        self.n_vocab = n_vocab
        ends = [(at, min(at + SPAN_VALUES, n_vocab)) for at in range(0, n_vocab, SPAN_VALUES)]
        self._spans = [
            (at, end, -(-(end - at) // F32_SUM_VALUES) * F32_SUM_VALUES) for at, end in ends
        ]
        self._scratch = np.zeros(SPAN_VALUES, np.float32)
        # the last span is rounded up to a multiple of F32_SUM_VALUES, and filled with zeros
        padded = self._spans[-1][0] + self._spans[-1][2]
        self._weight = np.zeros(n_vocab + F32_SUM_VALUES, np.float32)[:padded]
        self._ones = np.ones((F32_SUM_VALUES, 1), np.float32)

    def log_sum_exp(self, row: F32, *, store: bool = True) -> tuple[float, int, float]:
        """Return log Σ exp of a row, the index of its largest value, and Σ exp(row − largest). With
        `store`, the values exp(row − largest) stay in the buffer `_weight`.
        """
        best = int(row.argmax())
        peak, total = row[best], 0.0
        for at, end, padded in self._spans:
            size = end - at
            shifted = self._scratch[:size]
            np.subtract(row[at:end], peak, out=shifted)
            out = self._weight[at : at + padded] if store else self._scratch[:padded]
            np.exp(shifted, out=out[:size])
            out[size:] = 0
            total += self._f32_sum(out)
        return float(peak) + math.log(total) if total > 0 else math.nan, best, total

    def _f32_sum(self, values: F32) -> float:
        return float((values.reshape(-1, 1, F32_SUM_VALUES) @ self._ones).sum(dtype=np.float64))

    def score(self, row: F32, token: int) -> float:
        """Return −log p of `token`, the next token of the text."""
        return self.log_sum_exp(row, store=False)[0] - float(row[token])

    def compare(self, row: F32, base: F32, token: int) -> tuple[float, float, float, float]:
        """Compare a row of the model with the base's row at the same position. Return −log p of the
        next token by the model and by the base, the divergence, and 1 if both have the same
        likeliest token, else 0.
        """
        norm, best, _ = self.log_sum_exp(row, store=False)
        base_norm, base_best, total = self.log_sum_exp(base)
        floor, weighted_difference, counted_mass = (
            np.float32(base_norm + MIN_LOG_PROBABILITY),
            0.0,
            0.0,
        )
        for at, end, padded in self._spans:
            size = end - at
            weight, differences = self._weight[at : at + padded], self._scratch[:padded]
            np.multiply(weight[:size], base[at:end] > floor, out=weight[:size])
            np.subtract(base[at:end], row[at:end], out=differences[:size])
            differences[size:] = 0
            weighted_difference += float(
                (
                    weight.reshape(-1, 1, F32_SUM_VALUES)
                    @ differences.reshape(-1, F32_SUM_VALUES, 1)
                ).sum(dtype=np.float64)
            )
            counted_mass += self._f32_sum(weight)
        kld = (weighted_difference - counted_mass * (base_norm - norm)) / total
        # Logits of −inf in both rows give NaN, so the sum is taken over the counted tokens only.
        if not math.isfinite(kld):
            counts = np.flatnonzero(base > floor)
            logp = base[counts] - np.float64(base_norm)
            kld = float((np.exp(logp) * (logp - (row[counts] - np.float64(norm)))).sum())
        return (
            norm - float(row[token]),
            base_norm - float(base[token]),
            kld,
            float(best == base_best),
        )

    def compare_to_top(
        self, row: F32, top: TopLogits, token: int
    ) -> tuple[float, float, float, float, float]:
        """Return the same as compare(), but computed from the stored prediction of the base, and
        additionally the standard error of the divergence.

        The stored tokens' part of the divergence is exact. For all other tokens, the base's total
        probability P is stored, and the model's, Q, is computed. Their part of the divergence is P
        log(P/Q), which is exact, plus P times the mean of e^d − 1 − d over these tokens, with d =
        log(q/Q) − log(p/P). This mean is never negative and of second order in d. It is estimated
        from the drawn tokens. Unlike in compare(), tokens with probabilities below e^-16 count.
        """
        norm, best, _ = self.log_sum_exp(row, store=False)
        logq = row[top.ids] - np.float64(norm)
        kld, error = float((np.exp(top.logp, dtype=np.float64) * (top.logp - logq)).sum()), 0.0
        if len(top.drawn):
            model_rest = max(1.0 - float(np.exp(logq).sum()), 1e-9)
            log_ratio = (
                row[top.drawn]
                - np.float64(norm)
                - top.drawn_logp
                + math.log(top.rest_mass / model_rest)
            )
            terms = np.exp(log_ratio) - 1 - log_ratio
            kld += top.rest_mass * (math.log(top.rest_mass / model_rest) + float(terms.mean()))
            error = top.rest_mass * float(terms.std()) / math.sqrt(len(terms) - 1)
        return norm - float(row[token]), top.nll, kld, float(best == int(top.ids[0])), error

    def select_top(self, row: F32, token: int, seed: int) -> TopLogits:
        """Return the base's prediction in the form to be stored, given its row and the next token.

        The stored tokens are the TOP_TOKENS likeliest, or fewer if all others together have less
        than MIN_REST_MASS. DRAWN_TOKENS of the others are drawn systematically: at equal distances
        of cumulated probability, from a start that depends on `seed`.
        """
        norm, best, total = self.log_sum_exp(row)
        weight = self._weight[: self.n_vocab]
        count = min(TOP_TOKENS, self.n_vocab)
        ids = np.argpartition(row, self.n_vocab - count)[self.n_vocab - count :]
        ids = ids[np.lexsort((ids, -row[ids]))]
        mass = np.cumsum(weight[ids], dtype=np.float64) / total
        ids = ids[: int(np.searchsorted(mass, 1 - MIN_REST_MASS)) + 1]
        logp = (row[ids] - np.float64(norm)).astype(np.float32)
        weight[ids] = 0
        sums = np.cumsum(weight, dtype=np.float64)
        rest_mass, drawn = float(sums[-1]) / total, np.empty(0, np.int64)
        if rest_mass > MIN_REST_MASS:
            quantiles = (
                np.random.default_rng(seed).random() + np.arange(DRAWN_TOKENS)
            ) / DRAWN_TOKENS
            drawn = np.searchsorted(sums, quantiles * sums[-1], side="right")
        assert best == ids[0] or row[best] == row[ids[0]], (best, ids[0])
        drawn_logp = (row[drawn] - np.float64(norm)).astype(np.float32)
        return TopLogits(
            ids.astype(np.uint32),
            logp,
            norm - float(row[token]),
            rest_mass,
            drawn.astype(np.uint32),
            drawn_logp,
        )


class ThreadedScorer:
    """Scores the rows of a block in several threads at the same time, which works because numpy
    releases the GIL.
    """

    def __init__(self, n_vocab: int, threads: int) -> None:
        self._scorers = [RowScorer(n_vocab) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="score")

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def map(self, count: int, score_row: Callable[[RowScorer, int], T]) -> list[T]:
        """Return `score_row(scorer, i)` for every row i below `count`, in order. Each thread has
        its own scorer, and gets a range of neighboring rows.
        """
        rows_each = -(-count // len(self._scorers))

        def score_share(number: int) -> list[T]:
            scorer = self._scorers[number]
            # values that are not finite are reported later, by require_finite
            with np.errstate(invalid="ignore", over="ignore"):
                return [
                    score_row(scorer, i)
                    for i in range(number * rows_each, min((number + 1) * rows_each, count))
                ]

        return [
            row for rows in self._pool.map(score_share, range(len(self._scorers))) for row in rows
        ]


def require_finite(scores: PositionScores, chunk: int) -> PositionScores:
    """Return the scores unchanged. Raises UserError if the model or the base has predicted NaN or
    infinite values. `chunk` is the number of the chunk from 0, for the message.
    """
    for name, values in (("model", scores.nll), ("base", scores.base_nll)):
        if not np.isfinite(values).all():
            raise UserError(
                f"the {name} produced logits that are NaN or infinite in chunk {chunk + 1}",
                hint="the file may be damaged: compare it with its source by `llmcli diff`,"
                " or try -ctk f16 -ctv f16 -fa off",
            )
    if not np.isfinite(scores.kld).all():
        raise UserError(
            f"the divergence is infinite in chunk {chunk + 1}:"
            " the model rules out a token that the base expects",
            hint="the two files are of different models, or one is damaged",
        )
    return scores
