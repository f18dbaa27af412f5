"""Scores of logit rows (likelihood, KL divergence) and the base logits that are saved in part."""

from pathlib import Path

import numpy as np
import pytest

from quant.errors import UserError
from quant.evaluation import base_logits, divergence
from quant.evaluation.divergence import (
    DRAWN_TOKENS,
    F32,
    MIN_LOG_PROBABILITY,
    TOP_TOKENS,
    PositionScores,
    RowScorer,
    ThreadedScorer,
    TopLogits,
    require_finite,
)
from quant.record_log import RecordLog

VOCABULARY = 1000  # the vocabulary size, not a multiple of the span that is summed in float32


def rows(spread: float, seed: int = 0, count: int = 20) -> tuple[F32, F32]:
    random = np.random.default_rng(seed)
    base = (random.normal(size=(count, VOCABULARY)) * 4).astype(np.float32)
    return base, base + (random.normal(size=base.shape) * spread).astype(np.float32)


def logp(row: F32) -> np.ndarray:
    shifted = row.astype(np.float64) - row.max()
    return shifted - np.log(np.exp(shifted).sum())


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0])
def test_row_scores_equal_the_definitions(spread: float) -> None:
    scorer = RowScorer(VOCABULARY)
    for base, row in zip(*rows(spread), strict=True):
        p, q = logp(base), logp(row)
        counts = p > MIN_LOG_PROBABILITY
        nll, base_nll, kld, same_top = scorer.compare(row, base, 7)
        assert nll == pytest.approx(-q[7], abs=2e-6)
        assert base_nll == pytest.approx(-p[7], abs=2e-6)
        assert kld == pytest.approx((np.exp(p) * (p - q))[counts].sum(), abs=1e-6)
        assert same_top == (base.argmax() == row.argmax())
        assert scorer.score(row, 7) == nll


def test_tokens_with_probability_zero_do_not_count() -> None:
    (base, *_), (row, *_) = rows(0.1)
    without_infinities = RowScorer(VOCABULARY).compare(row, base, 7)[2]
    excluded = [np.append(one[:-1], np.float32(-np.inf)) for one in (row, base)]
    p, q = logp(base[:-1]), logp(row[:-1])
    with np.errstate(invalid="ignore"):
        kld = RowScorer(VOCABULARY).compare(*excluded, 7)[2]
    assert kld == pytest.approx((np.exp(p) * (p - q))[p > MIN_LOG_PROBABILITY].sum(), abs=1e-6)
    assert kld == pytest.approx(without_infinities, rel=0.1)


@pytest.mark.parametrize("spread", [0.02, 0.3, 1.5])
def test_divergence_from_top_and_sampled_tokens_is_within_its_error(spread: float) -> None:
    bases, models = rows(spread, count=400)
    scorer = RowScorer(VOCABULARY)
    exact, estimates, kld_errors = [], [], []
    for number, (base, row) in enumerate(zip(bases, models, strict=True)):
        top = scorer.select_top(base / 4, 3, number)  # flat: most probability is outside the top
        assert (len(top.ids), len(top.drawn)) == (TOP_TOKENS, DRAWN_TOKENS)
        nll, base_nll, kld, same_top, kld_error = scorer.compare_to_top(row / 4, top, 3)
        p, q = logp(base / 4), logp(row / 4)
        assert (nll, base_nll, same_top) == (
            *scorer.compare(row / 4, base / 4, 3)[:2],
            float(base.argmax() == row.argmax()),
        )
        exact.append(float((np.exp(p) * (p - q)).sum()))
        estimates.append(kld)
        kld_errors.append(kld_error)
    error = float(np.sqrt(np.square(kld_errors).sum())) / len(exact)
    assert 0 < error < 0.05 * np.mean(exact)
    assert np.mean(estimates) == pytest.approx(np.mean(exact), abs=5 * error)


def test_no_tokens_are_sampled_if_few_hold_all_probability() -> None:
    row = np.full(VOCABULARY, -30, np.float32)
    row[[5, 2, 9]] = (10, 12, 9)
    top = RowScorer(VOCABULARY).select_top(row, 5, 0)
    assert (top.ids.tolist(), len(top.drawn)) == ([2, 5, 9], 0)
    assert np.exp(top.logp, dtype=np.float64).sum() == pytest.approx(1)


@pytest.mark.parametrize("span", [256, 512])
def test_span_size_does_not_change_the_scores(span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (base, *_), (row, *_) = rows(0.5)
    expected = RowScorer(VOCABULARY).compare(row, base, 5)
    monkeypatch.setattr(divergence, "SPAN_VALUES", span)
    assert RowScorer(VOCABULARY).compare(row, base, 5) == pytest.approx(
        expected, rel=1e-7, abs=1e-9
    )


def test_threads_do_not_change_the_scores() -> None:
    base, row = rows(0.5)
    results = []
    for threads in (1, 3):
        scorers = ThreadedScorer(VOCABULARY, threads)
        results.append(scorers.map(len(row), lambda scorer, i: scorer.compare(row[i], base[i], i)))
        scorers.close()
    assert results[0] == results[1]


def test_nan_and_infinite_scores_are_refused_by_source() -> None:
    ones, nan = np.ones(2), np.array([1.0, np.nan])
    for scores, message in (
        (PositionScores(nan, ones, ones, ones, ones), "the model produced logits"),
        (PositionScores(ones, nan, ones, ones, ones), "the base produced logits"),
        (PositionScores(ones, ones, np.array([1.0, np.inf]), ones, ones), "infinite in chunk 5"),
    ):
        with pytest.raises(UserError, match=message):
            require_finite(scores, 4)


def test_likelihood_of_a_nan_row_is_nan() -> None:
    row = np.full(VOCABULARY, np.nan, np.float32)
    scorers = ThreadedScorer(VOCABULARY, 1)
    likelihoods = scorers.map(1, lambda scorer, i: scorer.score(row, 0))
    scorers.close()
    assert np.isnan(likelihoods).all()


def test_packed_rows_are_read_back_and_invalid_bytes_are_none() -> None:
    from quant.evaluation.base_logits import pack_rows, unpack_rows

    base, _ = rows(0.1, count=3)
    tops = [RowScorer(VOCABULARY).select_top(row, 1, i) for i, row in enumerate(base)]
    raw = pack_rows(tops)
    unpacked = unpack_rows(raw, 3, VOCABULARY)
    assert unpacked is not None
    for expected, actual in zip(tops, unpacked, strict=True):
        for name in TopLogits.__slots__:
            assert np.array_equal(getattr(expected, name), getattr(actual, name)), name
    assert unpack_rows(raw[:-1], 3, VOCABULARY) is None
    assert unpack_rows(raw, 4, VOCABULARY) is None
    assert unpack_rows(raw, 3, 10) is None
    assert unpack_rows(b"\xff" * len(raw), 3, VOCABULARY) is None
    # The negative log-likelihood and the rest mass of the first position have these offsets.
    for offset in (8 * 3, 8 * 6):
        assert (
            unpack_rows(
                raw[:offset] + np.float64(np.nan).tobytes() + raw[offset + 8 :], 3, VOCABULARY
            )
            is None
        )


def test_header_with_too_many_chunks_is_refused(tmp_path: Path) -> None:
    texts = dict.fromkeys(base_logits.TEXT_KEYS, "")
    head = {
        "kind": base_logits.RECORD_KIND,
        "n_ctx": 512,
        "n_vocab": 100,
        "chunks": 2**31 - 1,
        **texts,
    }
    RecordLog.create(path := tmp_path / "base", head).close()
    with pytest.raises(UserError, match="was not finished"):
        base_logits.load_base_logits(path)
