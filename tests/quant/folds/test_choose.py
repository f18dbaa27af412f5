"""Folds are chosen where they reduce the weighted error of the finished file."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quant import folds
from quant.calibration.imatrix import Imatrix, ImatrixEntry
from quant.errors import UserError
from quant.folds import choose, folded_plan
from quant.folds.folded_statistics import fold_statistics
from quant.folds.loss import ReaderTensor
from quant.formats import activation_rounding
from quant.native import ggml
from quant.quantize import write
from quant.quantize.plan import Plan, plan_quantization
from quant.source.source import Source
from tests.quant import tiny_gguf

HIDDEN, FF = 256, 512


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return write.open_gguf(tiny_gguf.llama(tmp_path / "model.gguf", hidden=HIDDEN, ff=FF, layers=1))


@pytest.fixture
def imatrix(source: Source, tmp_path: Path) -> Imatrix:
    """Mean squares of which a few columns have most; q, k and v share theirs, gate and up too."""
    path, random = tmp_path / "sums", np.random.default_rng(1)
    shared = {"attn_k": "attn_q", "attn_v": "attn_q", "ffn_up": "ffn_gate"}
    entries, offset, blobs, seen = {}, 0, [], {}
    for weight in source.weights:
        if len(weight.shape) < 2:
            continue
        role = weight.name.split(".")[-2]
        key = shared.get(role, role), weight.columns
        if key not in seen:
            seen[key] = np.exp(random.normal(0, 1.5, weight.columns)).astype(np.float32)
        entries[weight.name] = ImatrixEntry(path, offset, weight.columns, (1.0,))
        blobs.append(seen[key].tobytes())
        offset += 4 * weight.columns
    path.write_bytes(b"".join(blobs))
    return Imatrix(path, "digest", entries, "", 1)


def made(plan: Plan, out: Path) -> Source:
    write.write_model(plan, out, threads=1)
    return write.open_gguf(out)


def values(source: Source, role: str) -> np.ndarray:
    weight = next(weight for weight in source.weights if weight.name == f"blk.0.{role}.weight")
    return ggml.decode(weight.read(0, weight.rows), weight.type, weight.columns, label=role).astype(
        np.float64
    )


def error(source: Source, finished: Source, imatrix: Imatrix, role: str) -> float:
    """The error of q, k, v, gate or up together with the norm before it, for the norm's own inputs."""
    norm = "ffn_norm" if role.startswith("ffn") else "attn_norm"
    inputs = (
        imatrix.entries[f"blk.0.{role}.weight"].mean_squares(0, 1, HIDDEN)[0]
        / values(source, norm)[0] ** 2
    )
    before, after = (values(one, role) * values(one, norm) for one in (source, finished))
    return float((np.square(after - before) @ inputs).sum())


@pytest.mark.parametrize(("file_type", "method"), [("Q4_K_M", "ggml"), ("Q3_K_M", "search")])
def test_the_finished_file_has_less_error_and_the_same_size(
    file_type: str, method: str, source: Source, imatrix: Imatrix, tmp_path: Path
) -> None:
    plan = plan_quantization(source, file_type, imatrix=imatrix, method=method)
    found = choose.choose_folds(plan, ("awq",), 1)
    folded = folded_plan.fold_plan(plan, [one.fold for one in found if one.fold], "awq")
    plain, better = made(plan, tmp_path / "plain.gguf"), made(folded, tmp_path / "better.gguf")
    assert folded.nbytes - plan.nbytes == len(folded.layout.header) - len(plan.layout.header)
    for role in ("attn_q", "attn_k", "ffn_gate"):  # v and up have factors of rows as well
        assert error(source, better, imatrix, role) < 0.95 * error(source, plain, imatrix, role)


def test_channels_that_nothing_enters_do_not_hide_the_others(
    source: Source, imatrix: Imatrix
) -> None:
    sums, dead = np.fromfile(imatrix.path, "<f4"), np.arange(HIDDEN) % 5 == 0
    for entry in imatrix.entries.values():
        sums[entry.offset // 4 : entry.offset // 4 + entry.count : 5] = 0
    sums.tofile(imatrix.path)
    found = choose.choose_folds(plan_quantization(source, "Q4_K_M", imatrix=imatrix), ("awq",), 1)
    fold = next(one.fold for one in found if one.site.name == "blk.0.attn_norm")
    assert fold and fold.factors is not None
    assert fold.factors[~dead].max() > 1.5 * fold.factors[~dead].min()
    assert (fold.factors[dead] == fold.factors.min()).all()


def test_a_loss_is_that_of_rounded_weights_and_rounded_inputs(
    source: Source, imatrix: Imatrix
) -> None:
    plan = plan_quantization(source, "Q4_0", imatrix=imatrix)
    step = next(step for step in plan.steps if step.weight.name == "blk.0.attn_output.weight")
    means = imatrix.entries[step.weight.name].mean_squares(0, 1, HIDDEN)[0]
    rows = values(source, "attn_output")[:: HIDDEN // 64].astype(np.float32)
    weights = ggml.Importance(means[None], len(rows))
    again = ggml.decode(
        ggml.encode(rows, "Q4_0", label="", importance=weights), "Q4_0", HIDDEN, label=""
    )
    random = np.random.default_rng(2).normal(size=(4000, HIDDEN)) * np.sqrt(means)
    scale = np.abs(random.reshape(-1, 8, 32)).max(2, keepdims=True) / 127
    inputs = (np.rint(random.reshape(-1, 8, 32) / scale) * scale).reshape(random.shape)
    measured = np.square(inputs @ again.T - random @ rows.T).mean(0).sum()
    assert ReaderTensor(step).loss(folds.TensorEdit()) == pytest.approx(measured, rel=0.05)


def test_second_moments_weigh_the_loss_and_follow_a_fold(source: Source, imatrix: Imatrix) -> None:
    random, name = (
        np.random.default_rng(3).normal(size=(64, HIDDEN)).astype(np.float32),
        "blk.0.attn_q.weight",
    )

    class Known:
        columns, matrices = HIDDEN, 1

        def mean(self, matrix: int = 0) -> np.ndarray:
            return (random.T @ random / 64).astype(np.float32)

        def input_of(self, asked: str) -> "Known | None":
            return self if asked == name else None

    plan = replace(plan_quantization(source, "Q4_K_M", imatrix=imatrix), moments=Known())
    step = choose._FoldSearch(plan, ("awq",)).steps[name]
    changes = np.random.default_rng(4).normal(size=(8, HIDDEN)).astype(np.float32)
    measured = np.square(changes @ random.T).mean(1).sum()
    assert ReaderTensor(step).samples[0].energy(changes) == pytest.approx(measured, rel=1e-4)
    factors = np.exp(np.random.default_rng(5).normal(size=(1, HIDDEN))).astype(np.float32)
    second = fold_statistics(step.statistics, folds.TensorEdit(column_factors=factors)).moments
    assert second and np.einsum(
        "ij,jk,ik", changes * factors, second.mean(), changes * factors
    ) == pytest.approx(measured, rel=1e-4)


@pytest.mark.parametrize("size", [32, 256])
def test_the_largest_square_of_a_block_is_expected_as_it_is_drawn(size: int) -> None:
    means = np.exp(np.random.default_rng(1).normal(0, 1, (3, size))).astype(np.float32)
    drawn = np.random.default_rng(2).normal(size=(4000, 3, size)).astype(np.float32) * np.sqrt(
        means
    )
    assert activation_rounding.expected_largest_square(means) == pytest.approx(
        np.square(drawn).max(2).mean(0), rel=0.03
    )


def test_dealt_channels_share_the_highest_scores_out(source: Source, imatrix: Imatrix) -> None:
    plan = plan_quantization(source, "Q2_K", imatrix=imatrix)
    found = {one.site.name: one for one in choose.choose_folds(plan, ("deal",), 1)}
    order = choose._interleaved_order(
        found["blk.0.ffn_down"].site,
        [
            ReaderTensor(
                next(step for step in plan.steps if step.weight.name == "blk.0.ffn_down.weight")
            )
        ],
    )
    assert order is not None and sorted(order) == list(range(FF))
    means = imatrix.entries["blk.0.ffn_down.weight"].mean_squares(0, 1, FF)[0]
    best = np.argsort(-means * np.square(values(source, "ffn_down")).mean(0))[: FF // 16]
    assert len({np.flatnonzero(order == channel)[0] // 16 for channel in best}) == FF // 16
    assert all(one.loss_ratio < 1 for one in found.values() if one.fold)


def test_the_same_plan_gets_the_same_folds_and_its_file_is_recognised(
    source: Source, imatrix: Imatrix, tmp_path: Path
) -> None:
    plan, out = (
        plan_quantization(source, "Q4_0", imatrix=imatrix),
        tmp_path / "out.gguf",
    )
    chosen = [
        [
            one.fold
            for one in choose.choose_folds(
                plan, choose.parse_fold_kinds("awq,smooth,deal"), threads
            )
            if one.fold
        ]
        for threads in (1, 2)
    ]
    first, second = (folded_plan.fold_plan(plan, some, "all") for some in chosen)
    write.write_model(first, out, threads=1)
    assert write.is_finished(second, out) and not write.is_finished(plan, out)


def test_codes_that_are_kept_are_not_folded(
    source: Source, imatrix: Imatrix, tmp_path: Path
) -> None:
    kept = made(plan_quantization(source, "Q8_0"), tmp_path / "kept.gguf")
    assert (
        choose.choose_folds(plan_quantization(kept, "Q8_0", imatrix=imatrix), ("awq", "deal"), 1)
        == ()
    )


def test_folds_are_named_or_refused(source: Source) -> None:
    assert (
        choose.parse_fold_kinds("deal, awq") == ("awq", "deal")
        and choose.parse_fold_kinds("none") == ()
    )
    with pytest.raises(UserError, match="unknown fold 'awk'"):
        choose.parse_fold_kinds("awk")
    with pytest.raises(UserError, match="this plan has none"):
        choose.choose_folds(plan_quantization(source, "Q4_K_M"), ("awq",), 1)
