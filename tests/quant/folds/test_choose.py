"""Chosen folds reduce the weighted error of the quantized file."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quant import folds
from quant.calibration.imatrix import Imatrix, ImatrixEntry
from quant.calibration.text_record import UNKNOWN_TEXT
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
    """An importance matrix with a few dominant columns, shared by q, k, v and by gate, up."""
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
    return Imatrix(path, "digest", entries, UNKNOWN_TEXT, 1)


def write_plan(plan: Plan, out: Path) -> Source:
    write.write_model(plan, out, threads=1)
    return write.open_gguf(out)


def values(source: Source, role: str) -> np.ndarray:
    weight = next(weight for weight in source.weights if weight.name == f"blk.0.{role}.weight")
    return ggml.decode(weight.read(0, weight.rows), weight.type, weight.columns, label=role).astype(
        np.float64
    )


def weighted_error(source: Source, finished: Source, imatrix: Imatrix, role: str) -> float:
    """Return the weighted squared error of a weight multiplied with the norm before it.

    `role` is q, k, v, gate or up. Columns are weighted by the mean squares of the norm's inputs.
    """
    norm = "ffn_norm" if role.startswith("ffn") else "attn_norm"
    inputs = (
        imatrix.entries[f"blk.0.{role}.weight"].mean_squares(0, 1, HIDDEN)[0]
        / values(source, norm)[0] ** 2
    )
    before, after = (values(model, role) * values(model, norm) for model in (source, finished))
    return float((np.square(after - before) @ inputs).sum())


@pytest.mark.parametrize(("file_type", "method"), [("Q4_K_M", "ggml"), ("Q3_K_M", "search")])
def test_folds_reduce_the_error_and_keep_the_size(
    file_type: str, method: str, source: Source, imatrix: Imatrix, tmp_path: Path
) -> None:
    plan = plan_quantization(source, file_type, imatrix=imatrix, method=method)
    choices = choose.choose_folds(plan, ("awq",), 1)
    with_folds = folded_plan.fold_plan(
        plan, [choice.fold for choice in choices if choice.fold], "awq"
    )
    plain_model, folded_model = (
        write_plan(plan, tmp_path / "plain.gguf"),
        write_plan(with_folds, tmp_path / "folded.gguf"),
    )
    assert with_folds.nbytes - plan.nbytes == len(with_folds.layout.header) - len(
        plan.layout.header
    )
    for role in ("attn_q", "attn_k", "ffn_gate"):  # v and up also have row factors
        assert weighted_error(source, folded_model, imatrix, role) < 0.95 * weighted_error(
            source, plain_model, imatrix, role
        )


def test_dead_channels_do_not_affect_the_factors_of_others(
    source: Source, imatrix: Imatrix
) -> None:
    sums, dead = np.fromfile(imatrix.path, "<f4"), np.arange(HIDDEN) % 5 == 0
    for entry in imatrix.entries.values():
        sums[entry.offset // 4 : entry.offset // 4 + entry.count : 5] = 0
    sums.tofile(imatrix.path)
    choices = choose.choose_folds(plan_quantization(source, "Q4_K_M", imatrix=imatrix), ("awq",), 1)
    fold = next(choice.fold for choice in choices if choice.site.name == "blk.0.attn_norm")
    assert fold and fold.factors is not None
    assert fold.factors[~dead].max() > 1.5 * fold.factors[~dead].min()
    assert (fold.factors[dead] == fold.factors.min()).all()


def test_loss_includes_rounded_weights_and_rounded_inputs(source: Source, imatrix: Imatrix) -> None:
    plan = plan_quantization(source, "Q4_0", imatrix=imatrix)
    step = next(step for step in plan.steps if step.weight.name == "blk.0.attn_output.weight")
    means = imatrix.entries[step.weight.name].mean_squares(0, 1, HIDDEN)[0]
    rows = values(source, "attn_output")[:: HIDDEN // 64].astype(np.float32)
    weights = ggml.Importance(means[None], len(rows))
    rounded = ggml.decode(
        ggml.encode(rows, "Q4_0", label="", importance=weights), "Q4_0", HIDDEN, label=""
    )
    random = np.random.default_rng(2).normal(size=(4000, HIDDEN)) * np.sqrt(means)
    scale = np.abs(random.reshape(-1, 8, 32)).max(2, keepdims=True) / 127
    inputs = (np.rint(random.reshape(-1, 8, 32) / scale) * scale).reshape(random.shape)
    measured = np.square(inputs @ rounded.T - random @ rows.T).mean(0).sum()
    assert ReaderTensor(step).loss(folds.TensorEdit()) == pytest.approx(measured, rel=0.05)


def test_second_moments_weight_the_loss_and_are_folded(source: Source, imatrix: Imatrix) -> None:
    random, name = (
        np.random.default_rng(3).normal(size=(64, HIDDEN)).astype(np.float32),
        "blk.0.attn_q.weight",
    )

    class FixedMoments:
        columns, matrices = HIDDEN, 1

        def mean(self, matrix: int = 0) -> np.ndarray:
            return (random.T @ random / 64).astype(np.float32)

        def input_of(self, tensor_name: str) -> "FixedMoments | None":
            return self if tensor_name == name else None

    plan = replace(plan_quantization(source, "Q4_K_M", imatrix=imatrix), moments=FixedMoments())
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
def test_expected_largest_square_of_a_block_equals_samples(size: int) -> None:
    means = np.exp(np.random.default_rng(1).normal(0, 1, (3, size))).astype(np.float32)
    samples = np.random.default_rng(2).normal(size=(4000, 3, size)).astype(np.float32) * np.sqrt(
        means
    )
    assert activation_rounding.expected_largest_square(means) == pytest.approx(
        np.square(samples).max(2).mean(0), rel=0.03
    )


def test_deal_spreads_the_highest_scores_over_blocks(source: Source, imatrix: Imatrix) -> None:
    plan = plan_quantization(source, "Q2_K", imatrix=imatrix)
    choices = {choice.site.name: choice for choice in choose.choose_folds(plan, ("deal",), 1)}
    order = choose._interleaved_order(
        choices["blk.0.ffn_down"].site,
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
    assert all(choice.loss_ratio < 1 for choice in choices.values() if choice.fold)


def test_folds_are_deterministic_and_the_finished_file_is_recognized(
    source: Source, imatrix: Imatrix, tmp_path: Path
) -> None:
    plan, out = (
        plan_quantization(source, "Q4_0", imatrix=imatrix),
        tmp_path / "out.gguf",
    )
    runs = [
        [
            choice.fold
            for choice in choose.choose_folds(
                plan, choose.parse_fold_kinds("awq,smooth,deal"), threads
            )
            if choice.fold
        ]
        for threads in (1, 2)
    ]
    first, second = (folded_plan.fold_plan(plan, folds_of_run, "all") for folds_of_run in runs)
    write.write_model(first, out, threads=1)
    assert write.is_finished(second, out) and not write.is_finished(plan, out)


def test_copied_codes_are_not_folded(source: Source, imatrix: Imatrix, tmp_path: Path) -> None:
    quantized = write_plan(plan_quantization(source, "Q8_0"), tmp_path / "kept.gguf")
    assert (
        choose.choose_folds(
            plan_quantization(quantized, "Q8_0", imatrix=imatrix), ("awq", "deal"), 1
        )
        == ()
    )


def test_fold_names_are_parsed_or_refused(source: Source) -> None:
    assert (
        choose.parse_fold_kinds("deal, awq") == ("awq", "deal")
        and choose.parse_fold_kinds("none") == ()
    )
    with pytest.raises(UserError, match="unknown fold 'awk'"):
        choose.parse_fold_kinds("awk")
    with pytest.raises(UserError, match="this plan has none"):
        choose.choose_folds(plan_quantization(source, "Q4_K_M"), ("awq",), 1)
