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

WORDS = 1000  # not a multiple of the piece that is summed in float32


def rows(spread: float, seed: int = 0, count: int = 20) -> tuple[F32, F32]:
    random = np.random.default_rng(seed)
    base = (random.normal(size=(count, WORDS)) * 4).astype(np.float32)
    return base, base + (random.normal(size=base.shape) * spread).astype(np.float32)


def logp(row: F32) -> np.ndarray:
    wide = row.astype(np.float64) - row.max()
    return wide - np.log(np.exp(wide).sum())


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0])
def test_a_row_is_scored_as_the_definition_says(spread: float) -> None:
    lane = RowScorer(WORDS)
    for base, row in zip(*rows(spread), strict=True):
        p, q = logp(base), logp(row)
        counts = p > MIN_LOG_PROBABILITY
        nll, base_nll, kld, same = lane.compare(row, base, 7)
        assert nll == pytest.approx(-q[7], abs=2e-6)
        assert base_nll == pytest.approx(-p[7], abs=2e-6)
        assert kld == pytest.approx((np.exp(p) * (p - q))[counts].sum(), abs=1e-6)
        assert same == (base.argmax() == row.argmax())
        assert lane.score(row, 7) == nll


def test_tokens_that_both_rule_out_do_not_count() -> None:
    (base, *_), (row, *_) = rows(0.1)
    want = RowScorer(WORDS).compare(row, base, 7)[2]
    shut = [np.append(one[:-1], np.float32(-np.inf)) for one in (row, base)]
    p, q = logp(base[:-1]), logp(row[:-1])
    with np.errstate(invalid="ignore"):
        found = RowScorer(WORDS).compare(*shut, 7)[2]
    assert found == pytest.approx((np.exp(p) * (p - q))[p > MIN_LOG_PROBABILITY].sum(), abs=1e-6)
    assert found == pytest.approx(want, rel=0.1)


@pytest.mark.parametrize("spread", [0.02, 0.3, 1.5])
def test_what_was_kept_in_part_tells_the_divergence_within_its_error(spread: float) -> None:
    bases, models = rows(spread, count=400)
    lane = RowScorer(WORDS)
    exact, drawn, doubts = [], [], []
    for number, (base, row) in enumerate(zip(bases, models, strict=True)):
        top = lane.select_top(base / 4, 3, number)  # flat: most of the mass is in the rest
        assert (len(top.ids), len(top.drawn)) == (TOP_TOKENS, DRAWN_TOKENS)
        nll, base_nll, kld, same, doubt = lane.compare_to_top(row / 4, top, 3)
        p, q = logp(base / 4), logp(row / 4)
        assert (nll, base_nll, same) == (
            *lane.compare(row / 4, base / 4, 3)[:2],
            float(base.argmax() == row.argmax()),
        )
        exact.append(float((np.exp(p) * (p - q)).sum()))
        drawn.append(kld)
        doubts.append(doubt)
    error = float(np.sqrt(np.square(doubts).sum())) / len(exact)
    assert 0 < error < 0.05 * np.mean(exact)
    assert np.mean(drawn) == pytest.approx(np.mean(exact), abs=5 * error)


def test_of_a_row_that_few_tokens_hold_nothing_is_drawn() -> None:
    row = np.full(WORDS, -30, np.float32)
    row[[5, 2, 9]] = (10, 12, 9)
    top = RowScorer(WORDS).select_top(row, 5, 0)
    assert (top.ids.tolist(), len(top.drawn)) == ([2, 5, 9], 0)
    assert np.exp(top.logp, dtype=np.float64).sum() == pytest.approx(1)


@pytest.mark.parametrize("span", [256, 512])
def test_the_pieces_that_a_row_is_cut_into_change_nothing(
    span: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (base, *_), (row, *_) = rows(0.5)
    whole = RowScorer(WORDS).compare(row, base, 5)
    monkeypatch.setattr(divergence, "SPAN_VALUES", span)
    assert RowScorer(WORDS).compare(row, base, 5) == pytest.approx(whole, rel=1e-7, abs=1e-9)


def test_threads_change_nothing() -> None:
    base, row = rows(0.5)
    found = []
    for threads in (1, 3):
        lanes = ThreadedScorer(WORDS, threads)
        found.append(lanes.map(len(row), lambda lane, i: lane.compare(row[i], base[i], i)))
        lanes.close()
    assert found[0] == found[1]


def test_what_is_no_number_is_refused_by_name() -> None:
    one, none = np.ones(2), np.array([1.0, np.nan])
    for scores, words in (
        (PositionScores(none, one, one, one, one), "the model produced logits"),
        (PositionScores(one, none, one, one, one), "the base produced logits"),
        (PositionScores(one, one, np.array([1.0, np.inf]), one, one), "infinite in chunk 5"),
    ):
        with pytest.raises(UserError, match=words):
            require_finite(scores, 4)


def test_a_row_of_nan_has_no_likelihood() -> None:
    row = np.full(WORDS, np.nan, np.float32)
    lanes = ThreadedScorer(WORDS, 1)
    found = lanes.map(1, lambda lane, i: lane.score(row, 0))
    lanes.close()
    assert np.isnan(found).all()


def test_packing_keeps_all_and_strange_bytes_are_none() -> None:
    from quant.evaluation.base_logits import pack_rows, unpack_rows

    base, _ = rows(0.1, count=3)
    tops = [RowScorer(WORDS).select_top(row, 1, i) for i, row in enumerate(base)]
    raw = pack_rows(tops)
    back = unpack_rows(raw, 3, WORDS)
    assert back is not None
    for mine, other in zip(tops, back, strict=True):
        for name in TopLogits.__slots__:
            assert np.array_equal(getattr(mine, name), getattr(other, name)), name
    assert unpack_rows(raw[:-1], 3, WORDS) is None
    assert unpack_rows(raw, 4, WORDS) is None
    assert unpack_rows(raw, 3, 10) is None
    assert unpack_rows(b"\xff" * len(raw), 3, WORDS) is None
    for at in (8 * 3, 8 * 6):  # what came, and the rest, of the first position
        assert (
            unpack_rows(raw[:at] + np.float64(np.nan).tobytes() + raw[at + 8 :], 3, WORDS) is None
        )


def test_a_head_may_claim_any_number_of_chunks(tmp_path: Path) -> None:
    words = dict.fromkeys(base_logits.TEXT_KEYS, "")
    head = {
        "kind": base_logits.RECORD_KIND,
        "n_ctx": 512,
        "n_vocab": 100,
        "chunks": 2**31 - 1,
        **words,
    }
    RecordLog.create(path := tmp_path / "base", head).close()
    with pytest.raises(UserError, match="was not finished"):
        base_logits.load_base_logits(path)
