"""Collected second moments equal those of numpy in float64, for any number of passes and after a
kill.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from quant.calibration import moments, moments_collector, moments_writer
from quant.calibration.attention_moments import QUERY_STEP
from quant.calibration.imatrix_collector import AttentionMixture, ImatrixCollector, WeightProduct
from quant.calibration.imatrix_writer import build_imatrix_file
from quant.calibration.merge import merge_imatrix, merge_moments
from quant.calibration.moments import MomentsOrigin
from quant.calibration.moments_collector import InputSurvey, MomentsCollector
from quant.calibration.moments_writer import MomentSums
from quant.calibration.resume_file import CalibrationProgress, CalibrationState
from quant.calibration.text_record import TextRecord
from quant.calibration.triangle import whole_matrix
from quant.errors import UserError

CHUNKS, TOKENS, WIDTH, EXPERTS = 5, 24, 6, 4
NAMES = (
    "blk.0.attn_q.weight",
    "blk.0.attn_k.weight",
    "blk.0.ffn_down.weight",
    "blk.1.ffn_up_exps.weight",
    "output.weight",
)


def rows(chunk: int, width: int, seed: int) -> np.ndarray:
    return np.random.default_rng((chunk, seed)).normal(0.2, 1, (TOKENS, width)).astype(np.float32)


def expert_choices(chunk: int) -> np.ndarray:
    """Return two experts for each token of a chunk, of shape (TOKENS, 2). Expert 3 gets none."""
    return np.random.default_rng(chunk).permuted(
        np.tile(np.arange(3, dtype=np.int32), (TOKENS, 1)), axis=1
    )[:, :2]


def products(chunk: int) -> Iterator[WeightProduct]:
    """Yield what the eval callback of a model would show in one pass over a chunk."""
    hidden = rows(chunk, WIDTH, 0)[None, None]
    for name in NAMES[:2]:
        yield WeightProduct(name, hidden, (1, 1), None, (1, chunk))
    yield WeightProduct(NAMES[2], rows(chunk, 2 * WIDTH, 1)[None, None], (1, 1), None, (2, chunk))
    yield WeightProduct(
        NAMES[3], rows(chunk, WIDTH, 2)[:, None], (EXPERTS, 1), expert_choices(chunk), (3, chunk)
    )
    yield WeightProduct(NAMES[4], rows(chunk, WIDTH, 3)[None, None], (1, 1), None, (1, chunk))


def survey_inputs() -> InputSurvey:
    survey = InputSurvey()
    for chunk in (0, 0):  # one chunk, read in two passes
        for product in products(chunk):
            survey.add(product)
    return survey


def write_file(
    folder: Path, memory: int = 1 << 20, chunks: range = range(CHUNKS)
) -> tuple[Path, int]:
    """Write a moments file in as many passes as `memory` bytes require.

    Returns the file and the number of passes.
    """
    survey = survey_inputs()
    groups = moments_collector.split_into_groups(survey, range(len(survey.inputs)), memory)
    with moments_writer.MomentsWriter(
        folder, MomentsOrigin("model", TOKENS, len(chunks)), survey.inputs
    ) as writer:
        for group in groups:
            collector = MomentsCollector(survey.inputs, group)
            for chunk in chunks:
                for product in products(chunk):
                    collector.add(product)
                collector.end_chunk()
                collector.flush(ImatrixCollector())
            for number, input_sums in collector.sums.items():
                writer.write_input(number, input_sums)
        writer.finish()
    return folder, len(groups)


def test_weights_with_the_same_input_rows_share_an_input() -> None:
    survey = survey_inputs()
    assert [entry.names for entry in survey.inputs] == [NAMES[:2], *((name,) for name in NAMES[2:])]
    assert [(entry.columns, entry.matrices) for entry in survey.inputs] == [
        (6, 1),
        (12, 1),
        (6, 4),
        (6, 1),
    ]
    assert survey.rows == [2 * 4 * TOKENS * entry.columns for entry in survey.inputs]


def test_moments_equal_numpy_in_float64(tmp_path: Path) -> None:
    path, _ = write_file(tmp_path / "m")
    loaded = moments.load_moments(path)
    for name, width, seed in ((NAMES[1], WIDTH, 0), (NAMES[2], 2 * WIDTH, 1), (NAMES[4], WIDTH, 3)):
        x = np.concatenate([rows(chunk, width, seed) for chunk in range(CHUNKS)]).astype(np.float64)
        second = loaded.input_of(name)
        assert second is not None
        assert second.counts == (len(x),)
        np.testing.assert_allclose(second.sums(), x.T @ x, rtol=2e-6, atol=1e-5)
        np.testing.assert_allclose(second.first_mean(), x.mean(0), rtol=1e-5, atol=1e-6)


def test_moments_of_an_expert_cover_the_rows_routed_to_it(tmp_path: Path) -> None:
    second = moments.load_moments(write_file(tmp_path / "m")[0]).input_of(NAMES[3])
    assert second is not None
    assert second.unseen_matrices == 1
    for expert in range(3):
        x = np.concatenate(
            [
                rows(chunk, WIDTH, 2)[(expert_choices(chunk) == expert).any(1)]
                for chunk in range(CHUNKS)
            ]
        )
        assert second.counts[expert] == len(x)
        np.testing.assert_allclose(second.sums(expert), x.T.astype(float) @ x, rtol=2e-6, atol=1e-5)


def test_a_memory_limit_adds_passes_and_keeps_the_bytes(tmp_path: Path) -> None:
    single_pass, passes = write_file(tmp_path / "one")
    assert passes == 1
    survey = survey_inputs()
    largest = max(moments_collector.group_bytes(survey, [number]) for number in range(4))
    several_passes, passes = write_file(tmp_path / "few", memory=largest)
    assert passes > 1
    assert single_pass.read_bytes() == several_passes.read_bytes()
    with pytest.raises(
        UserError,
        match=r"second moments of blk\.0\.ffn_down\.weight \(12 columns\) need .* may be used",
    ):
        moments_collector.split_into_groups(survey, range(4), largest - 1)


def test_a_saved_pass_is_continued_with_the_same_result(tmp_path: Path) -> None:
    survey = survey_inputs()

    def collect(progress: CalibrationProgress, chunks: range) -> CalibrationProgress:
        for chunk in chunks:
            assert progress.moments
            for product in products(chunk):
                progress.moments.add(product)
            progress.moments.end_chunk()
            progress.moments.flush(progress.sums)
            progress.chunks += 1
        return progress

    def new_progress() -> CalibrationProgress:
        return CalibrationProgress(
            ImatrixCollector(), MomentsCollector(survey.inputs, range(4)), {9}
        )

    expected = collect(new_progress(), range(CHUNKS))
    state = CalibrationState(tmp_path / "state", {"of": "this"}, survey.inputs)
    state.save(collect(new_progress(), range(2)))
    assert CalibrationState(tmp_path / "state", {"of": "that"}, survey.inputs).load() is None
    loaded = state.load()
    assert loaded is not None
    assert (loaded.chunks, loaded.finished) == (2, {9})
    continued = collect(loaded, range(2, CHUNKS))
    assert build_imatrix_file(
        continued.sums.sums, continued.sums.counts, TextRecord(("a",)), 1, 2
    ) == build_imatrix_file(expected.sums.sums, expected.sums.counts, TextRecord(("a",)), 1, 2)
    assert continued.moments
    assert expected.moments
    for number in range(4):
        ours, theirs = continued.moments.sums[number], expected.moments.sums[number]
        assert all(
            np.array_equal(getattr(ours, key), getattr(theirs, key))
            for key in ("second", "first", "counts")
        )
    raw = (tmp_path / "state").read_bytes()
    (tmp_path / "state").write_bytes(raw[:-3])  # a truncated file is ignored
    assert state.load() is None
    state.discard()
    assert not list(tmp_path.glob("state*"))


def test_merged_moments_equal_those_of_one_run(tmp_path: Path) -> None:
    expected = moments.load_moments(write_file(tmp_path / "whole")[0])
    runs = [
        write_file(tmp_path / "a", chunks=range(2))[0],
        write_file(tmp_path / "b", chunks=range(2, CHUNKS))[0],
    ]
    summary = merge_moments(runs, tmp_path / "merged")
    merged = moments.load_moments(tmp_path / "merged")
    assert (summary.chunks, merged.origin.chunks) == (CHUNKS, CHUNKS)
    for expected_input, merged_input in zip(expected.inputs, merged.inputs, strict=True):
        assert expected_input.counts == merged_input.counts
        for matrix in range(expected_input.matrices):
            np.testing.assert_allclose(
                merged_input.mean(matrix), expected_input.mean(matrix), rtol=1e-5, atol=1e-6
            )


def test_moments_of_different_models_are_not_merged(tmp_path: Path) -> None:
    def write(name: str, weight: str, width: int, origin: MomentsOrigin) -> Path:
        return moments_writer.write_moments(
            tmp_path / name,
            [([weight], moments_writer.MomentSums.from_rows(np.ones((3, width))))],
            origin,
        )

    first = write("a", "w", 4, MomentsOrigin("m"))
    for other, message in (
        (write("b", "v", 4, MomentsOrigin("m")), "another model than .*: only one of them has v"),
        (
            write("c", "w", 5, MomentsOrigin("m")),
            "another model than .*: w has 1 x 5 columns, not 1 x 4",
        ),
        (write("d", "w", 4, MomentsOrigin("n")), "another file of this model"),
        (write("e", "w", 4, MomentsOrigin("m", transform="f")), "with other folds"),
    ):
        with pytest.raises(UserError, match=message):
            merge_moments([first, other], tmp_path / "out")
        assert not (tmp_path / "out").exists()
    summary = merge_moments(
        [write("f", "w", 4, MomentsOrigin("m", texts=("t",), chunk_size=8))] * 2, tmp_path / "out"
    )
    assert "counts twice" in summary.notes[0]


def test_input_that_is_not_finite_is_refused_by_name() -> None:
    product = next(products(0))
    product.rows[0, 0, 3, 2] = np.nan
    with pytest.raises(UserError, match=r"the input of blk\.0\.attn_q\.weight is not finite"):
        ImatrixCollector().add(product)


def test_columns_of_zeros_are_counted() -> None:
    sums = ImatrixCollector()
    for product in products(0):
        product.rows[..., 1] = 0
        sums.add(product)
    # Only the three experts with tokens count: the fourth has no rows.
    assert sums.dead_columns() == {name: 3 if "exps" in name else 1 for name in NAMES}
    assert sums.unseen_experts() == {NAMES[3]: 1}


def test_importance_matrices_in_gguf_and_dat_files_are_added(tmp_path: Path) -> None:
    from quant.calibration import imatrix
    from tests.quant.upstream import Sums, write_dat, write_gguf

    values = np.random.default_rng(0).uniform(1, 9, (1, 5)).astype(np.float32)
    experts = np.random.default_rng(1).uniform(1, 9, (3, 5)).astype(np.float32)
    sums = {
        "blk.0.a.weight": Sums(values, np.array([4])),
        "blk.0.a_exps.weight": Sums(experts, np.array([4, 2, 0])),
    }
    new = write_gguf(tmp_path / "new", sums)
    _, pieces = merge_imatrix([new, new])
    (out := tmp_path / "out").write_bytes(b"".join(pieces))
    merged = imatrix.load_imatrix(out)
    assert (merged.chunks, merged.chunk_size, merged.text.names) == (
        14,
        512,
        ("wiki.txt", "code.txt"),
    )
    assert merged.text.windows == ()  # unknown of files that record none
    assert merged.entries["blk.0.a_exps.weight"].divisors == (8, 4, 0)
    assert np.array_equal(merged.entries["blk.0.a_exps.weight"].sums(), 2 * experts)
    # A dat file holds means, each over 7 chunks of 512 rows.
    old = write_dat(tmp_path / "old", sums)
    summary, pieces = merge_imatrix([old, new])
    out.write_bytes(b"".join(pieces))
    merged = imatrix.load_imatrix(out)
    assert "older form" in summary.notes[0]
    assert merged.entries["blk.0.a.weight"].divisors == (4 + 7 * 512,)
    np.testing.assert_allclose(
        merged.entries["blk.0.a.weight"].sums(), values + values / 4 * 7 * 512, rtol=1e-6
    )
    other = write_gguf(
        tmp_path / "other", {**sums, "blk.0.a.weight": Sums(values[:, :4], np.array([4]))}
    )
    with pytest.raises(
        UserError, match=r"other is of another model than .*: blk\.0\.a\.weight has 4 values, not 5"
    ):
        merge_imatrix([new, other])
    larger = write_gguf(tmp_path / "more", {**sums, "blk.1.a.weight": sums["blk.0.a.weight"]})
    with pytest.raises(
        UserError, match=r"new is of another model than .*more: it has no blk\.1\.a\.weight"
    ):
        merge_imatrix([larger, new])


def test_passes_of_a_single_weight_are_counted_separately_at_the_same_address() -> None:
    sums = ImatrixCollector()
    for chunk in range(2):
        sums.add(WeightProduct("w", rows(chunk, WIDTH, 0)[None, None], (1, 1), None, (1, 1)))
    x = np.concatenate([rows(chunk, WIDTH, 0) for chunk in range(2)])
    np.testing.assert_allclose(sums.sums["w"][0], np.square(x).sum(0), rtol=1e-6)


def test_a_chunk_in_several_passes_gives_the_same_moments() -> None:
    survey = survey_inputs()
    two_passes, per_chunk = (
        MomentsCollector(survey.inputs, range(4)),
        MomentsCollector(survey.inputs, range(4)),
    )
    for chunk in range(2):
        for product in products(chunk):
            two_passes.add(product)
            per_chunk.add(product)
        per_chunk.end_chunk()
        per_chunk.flush(ImatrixCollector())
    two_passes.end_chunk()
    two_passes.flush(ImatrixCollector())
    for number in range(4):
        assert np.array_equal(two_passes.sums[number].counts, per_chunk.sums[number].counts)
        np.testing.assert_allclose(
            two_passes.sums[number].first, per_chunk.sums[number].first, rtol=1e-6
        )
        ours, theirs = (
            whole_matrices(collector.sums[number]) for collector in (two_passes, per_chunk)
        )
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def whole_matrices(sums: MomentSums) -> np.ndarray:
    """Return the sums of x x^T [matrices, columns, columns]."""
    return np.stack(
        [
            whole_matrix(sums.triangle(matrix).read_stripes(), sums.columns)
            for matrix in range(len(sums.counts))
        ]
    )


def attention_weights(chunk: int) -> np.ndarray:
    """Return causal attention weights of shape (3 heads, TOKENS queries, TOKENS keys).

    The power of 40 makes most weights almost zero.
    """
    weights = np.random.default_rng((chunk, 9)).exponential(1, (3, TOKENS, TOKENS)) ** 40 * np.tri(
        TOKENS
    )
    normalized: np.ndarray = (weights / weights.sum(-1, keepdims=True)).astype(np.float32)
    return normalized


def test_moments_of_attention_mixed_rows_do_not_depend_on_threads() -> None:
    names, width = (
        ("blk.0.attn_q.weight", "blk.0.attn_v.weight"),
        300,
    )  # more columns than one band of the product
    survey = InputSurvey(TOKENS)
    collectors: list[MomentsCollector] = []

    def show(chunk: int, listener: InputSurvey | MomentsCollector) -> None:
        for name in names:
            listener.add(
                WeightProduct(name, rows(chunk, width, 0)[None, None], (1, 1), None, (1, chunk))
            )
        listener.add_mixture(AttentionMixture("kqv-0", attention_weights(chunk)))

    show(0, survey)
    assert [(serial.names, serial.mixed) for serial in survey.inputs] == [
        (names[:1], False),
        (names[1:], True),
    ]
    assert survey.chunks_per_product == 4
    with ThreadPoolExecutor(2) as pool:
        for mapping in (map, pool.map):
            collectors.append(MomentsCollector(survey.inputs, range(2)))
            for chunk in range(CHUNKS):
                show(chunk, collectors[-1])
                collectors[-1].end_chunk(mapping)
                if chunk in (3, CHUNKS - 1):
                    collectors[-1].flush(ImatrixCollector(), mapping)
    x = np.concatenate([rows(chunk, width, 0) for chunk in range(CHUNKS)]).astype(np.float64)
    sampled_weights = [
        attention_weights(chunk)[:, QUERY_STEP - 1 :: QUERY_STEP].astype(np.float64)
        for chunk in range(CHUNKS)
    ]
    mixed = np.concatenate(
        [sampled_weights[chunk] @ rows(chunk, width, 0) for chunk in range(CHUNKS)]
    )
    mixed = mixed.reshape(-1, width)
    for number, expected in enumerate((x, mixed)):
        serial, threaded = (collector.sums[number] for collector in collectors)
        assert all(
            np.array_equal(getattr(serial, key), getattr(threaded, key))
            for key in ("second", "first", "counts")
        )
        assert serial.counts == len(expected)
        np.testing.assert_allclose(
            whole_matrices(serial)[0], expected.T @ expected, rtol=2e-5, atol=2e-3
        )
        np.testing.assert_allclose(serial.first[0], expected.sum(0), rtol=1e-5, atol=1e-3)
