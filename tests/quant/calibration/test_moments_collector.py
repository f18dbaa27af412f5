"""Second moments of known rows equal numpy's in float64, in any number of passes and after any
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
from quant.calibration.resume_file import CalibrationProgress, CalibrationState
from quant.errors import UserError

CHUNKS, TOKENS, WIDE, EXPERTS = 5, 24, 6, 4
NAMES = (
    "blk.0.attn_q.weight",
    "blk.0.attn_k.weight",
    "blk.0.ffn_down.weight",
    "blk.1.ffn_up_exps.weight",
    "output.weight",
)


def rows(chunk: int, width: int, seed: int) -> np.ndarray:
    return np.random.default_rng((chunk, seed)).normal(0.2, 1, (TOKENS, width)).astype(np.float32)


def chosen(chunk: int) -> np.ndarray:
    """Two experts for each token, expert 3 never."""
    return np.random.default_rng(chunk).permuted(
        np.tile(np.arange(3, dtype=np.int32), (TOKENS, 1)), axis=1
    )[:, :2]


def products(chunk: int) -> Iterator[WeightProduct]:
    """A model's pass over a chunk, as its eval callback would show it."""
    hidden = rows(chunk, WIDE, 0)[None, None]
    for name in NAMES[:2]:
        yield WeightProduct(name, hidden, (1, 1), None, (1, chunk))
    yield WeightProduct(NAMES[2], rows(chunk, 2 * WIDE, 1)[None, None], (1, 1), None, (2, chunk))
    yield WeightProduct(
        NAMES[3], rows(chunk, WIDE, 2)[:, None], (EXPERTS, 1), chosen(chunk), (3, chunk)
    )
    yield WeightProduct(NAMES[4], rows(chunk, WIDE, 3)[None, None], (1, 1), None, (1, chunk))


def surveyed() -> InputSurvey:
    survey = InputSurvey()
    for chunk in (0, 0):  # a chunk in two passes
        for product in products(chunk):
            survey.add(product)
    return survey


def gathered(
    folder: Path, memory: int = 1 << 20, chunks: range = range(CHUNKS)
) -> tuple[Path, int]:
    """A file of moments in as many passes as `memory` asks for."""
    survey = surveyed()
    groups = moments_collector.split_into_groups(survey, range(len(survey.inputs)), memory)
    with moments_writer.MomentsWriter(
        folder, MomentsOrigin("model", TOKENS, len(chunks)), survey.inputs
    ) as file:
        for group in groups:
            seconds = MomentsCollector(survey.inputs, group)
            for chunk in chunks:
                for product in products(chunk):
                    seconds.add(product)
                seconds.end_chunk()
                seconds.flush(ImatrixCollector())
            for number, one in seconds.sums.items():
                file.write_input(number, one)
        file.finish()
    return folder, len(groups)


def test_weights_that_the_same_rows_enter_share_an_input() -> None:
    survey = surveyed()
    assert [one.names for one in survey.inputs] == [NAMES[:2], *((name,) for name in NAMES[2:])]
    assert [(one.columns, one.matrices) for one in survey.inputs] == [
        (6, 1),
        (12, 1),
        (6, 4),
        (6, 1),
    ]
    assert survey.rows == [2 * 4 * TOKENS * one.columns for one in survey.inputs]


def test_they_are_numpys_own_in_float64(tmp_path: Path) -> None:
    path, _ = gathered(tmp_path / "m")
    found = moments.load_moments(path)
    for name, width, seed in ((NAMES[1], WIDE, 0), (NAMES[2], 2 * WIDE, 1), (NAMES[4], WIDE, 3)):
        x = np.concatenate([rows(chunk, width, seed) for chunk in range(CHUNKS)]).astype(np.float64)
        second = found.input_of(name)
        assert second is not None
        assert second.counts == (len(x),)
        np.testing.assert_allclose(second.sums(), x.T @ x, rtol=2e-6, atol=1e-5)
        np.testing.assert_allclose(second.first_mean(), x.mean(0), rtol=1e-5, atol=1e-6)


def test_each_expert_has_the_rows_that_went_to_it(tmp_path: Path) -> None:
    second = moments.load_moments(gathered(tmp_path / "m")[0]).input_of(NAMES[3])
    assert second is not None
    assert second.unseen_matrices == 1
    for expert in range(3):
        x = np.concatenate(
            [rows(chunk, WIDE, 2)[(chosen(chunk) == expert).any(1)] for chunk in range(CHUNKS)]
        )
        assert second.counts[expert] == len(x)
        np.testing.assert_allclose(second.sums(expert), x.T.astype(float) @ x, rtol=2e-6, atol=1e-5)


def test_little_memory_takes_several_passes_and_gives_the_same_bytes(tmp_path: Path) -> None:
    one, passes = gathered(tmp_path / "one")
    assert passes == 1
    survey = surveyed()
    largest = max(moments_collector.group_bytes(survey, [number]) for number in range(4))
    few, passes = gathered(tmp_path / "few", memory=largest)
    assert passes > 1
    assert one.read_bytes() == few.read_bytes()
    with pytest.raises(
        UserError,
        match=r"second moments of blk\.0\.ffn_down\.weight \(12 columns\) need .* may be used",
    ):
        moments_collector.split_into_groups(survey, range(4), largest - 1)


def test_a_pass_that_was_saved_goes_on_with_the_same_bytes(tmp_path: Path) -> None:
    survey = surveyed()

    def read(progress: CalibrationProgress, chunks: range) -> CalibrationProgress:
        for chunk in chunks:
            assert progress.moments
            for product in products(chunk):
                progress.moments.add(product)
            progress.moments.end_chunk()
            progress.moments.flush(progress.sums)
            progress.chunks += 1
        return progress

    def begin() -> CalibrationProgress:
        return CalibrationProgress(
            ImatrixCollector(), MomentsCollector(survey.inputs, range(4)), {9}
        )

    whole = read(begin(), range(CHUNKS))
    interim = CalibrationState(tmp_path / "state", {"of": "this"}, survey.inputs)
    interim.save(read(begin(), range(2)))
    assert CalibrationState(tmp_path / "state", {"of": "that"}, survey.inputs).load() is None
    found = interim.load()
    assert found is not None
    assert (found.chunks, found.finished) == (2, {9})
    again = read(found, range(2, CHUNKS))
    assert build_imatrix_file(
        again.sums.sums, again.sums.counts, ["a"], 1, 2
    ) == build_imatrix_file(whole.sums.sums, whole.sums.counts, ["a"], 1, 2)
    assert again.moments
    assert whole.moments
    for number in range(4):
        one, other = again.moments.sums[number], whole.moments.sums[number]
        assert all(
            np.array_equal(getattr(one, key), getattr(other, key))
            for key in ("second", "first", "counts")
        )
    raw = (tmp_path / "state").read_bytes()
    (tmp_path / "state").write_bytes(raw[:-3])  # a torn file is none
    assert interim.load() is None
    interim.discard()
    assert not list(tmp_path.glob("state*"))


def test_merged_runs_are_one_run(tmp_path: Path) -> None:
    whole = moments.load_moments(gathered(tmp_path / "whole")[0])
    parts = [
        gathered(tmp_path / "a", chunks=range(2))[0],
        gathered(tmp_path / "b", chunks=range(2, CHUNKS))[0],
    ]
    made = merge_moments(parts, tmp_path / "merged")
    found = moments.load_moments(tmp_path / "merged")
    assert (made.chunks, found.origin.chunks) == (CHUNKS, CHUNKS)
    for one, other in zip(whole.inputs, found.inputs, strict=True):
        assert one.counts == other.counts
        for matrix in range(one.matrices):
            np.testing.assert_allclose(other.mean(matrix), one.mean(matrix), rtol=1e-5, atol=1e-6)


def test_moments_of_different_models_are_not_merged(tmp_path: Path) -> None:
    def write(name: str, weight: str, width: int, about: MomentsOrigin) -> Path:
        return moments_writer.write_moments(
            tmp_path / name,
            [([weight], moments_writer.MomentSums.from_rows(np.ones((3, width))))],
            about,
        )

    first = write("a", "w", 4, MomentsOrigin("m"))
    for other, why in (
        (write("b", "v", 4, MomentsOrigin("m")), "another model than .*: only one of them has v"),
        (
            write("c", "w", 5, MomentsOrigin("m")),
            "another model than .*: w has 1 x 5 columns, not 1 x 4",
        ),
        (write("d", "w", 4, MomentsOrigin("n")), "another file of this model"),
        (write("e", "w", 4, MomentsOrigin("m", transform="f")), "with other folds"),
    ):
        with pytest.raises(UserError, match=why):
            merge_moments([first, other], tmp_path / "out")
        assert not (tmp_path / "out").exists()
    twice = merge_moments(
        [write("f", "w", 4, MomentsOrigin("m", texts=("t",), chunk_size=8))] * 2, tmp_path / "out"
    )
    assert "counts twice" in twice.notes[0]


def test_what_is_not_finite_ends_a_run_at_once_by_name() -> None:
    product = next(products(0))
    product.rows[0, 0, 3, 2] = np.nan
    with pytest.raises(UserError, match=r"the input of blk\.0\.attn_q\.weight is not finite"):
        ImatrixCollector().add(product)


def test_columns_that_nothing_enters_are_counted() -> None:
    sums = ImatrixCollector()
    for product in products(0):
        product.rows[..., 1] = 0
        sums.add(product)
    # Of the experts the three that were seen: the fourth has no say.
    assert sums.dead_columns() == {name: 3 if "exps" in name else 1 for name in NAMES}
    assert sums.unseen_experts() == {NAMES[3]: 1}


def test_importance_matrices_of_both_forms_add_up(tmp_path: Path) -> None:
    from quant.calibration import imatrix
    from tests.quant.upstream import Sums as Given
    from tests.quant.upstream import write_dat, write_gguf

    values = np.random.default_rng(0).uniform(1, 9, (1, 5)).astype(np.float32)
    experts = np.random.default_rng(1).uniform(1, 9, (3, 5)).astype(np.float32)
    one = {
        "blk.0.a.weight": Given(values, np.array([4])),
        "blk.0.a_exps.weight": Given(experts, np.array([4, 2, 0])),
    }
    new = write_gguf(tmp_path / "new", one)
    _, pieces = merge_imatrix([new, new])
    (out := tmp_path / "out").write_bytes(b"".join(pieces))
    found = imatrix.load_imatrix(out)
    assert (found.chunks, found.chunk_size, found.datasets) == (14, 512, ("wiki.txt", "code.txt"))
    assert found.entries["blk.0.a_exps.weight"].divisors == (8, 4, 0)
    assert np.array_equal(found.entries["blk.0.a_exps.weight"].sums(), 2 * experts)
    # The older form: means, each of 7 chunks of 512 rows.
    old = write_dat(tmp_path / "old", one)
    made, pieces = merge_imatrix([old, new])
    out.write_bytes(b"".join(pieces))
    found = imatrix.load_imatrix(out)
    assert "older form" in made.notes[0]
    assert found.entries["blk.0.a.weight"].divisors == (4 + 7 * 512,)
    np.testing.assert_allclose(
        found.entries["blk.0.a.weight"].sums(), values + values / 4 * 7 * 512, rtol=1e-6
    )
    other = write_gguf(
        tmp_path / "other", {**one, "blk.0.a.weight": Given(values[:, :4], np.array([4]))}
    )
    with pytest.raises(
        UserError, match=r"other is of another model than .*: blk\.0\.a\.weight has 4 values, not 5"
    ):
        merge_imatrix([new, other])
    more = write_gguf(tmp_path / "more", {**one, "blk.1.a.weight": one["blk.0.a.weight"]})
    with pytest.raises(
        UserError, match=r"new is of another model than .*more: it has no blk\.1\.a\.weight"
    ):
        merge_imatrix([more, new])


def test_a_lone_weight_s_passes_are_told_apart_where_its_rows_stand_in_the_same_place() -> None:
    sums = ImatrixCollector()
    for chunk in range(2):
        sums.add(WeightProduct("w", rows(chunk, WIDE, 0)[None, None], (1, 1), None, (1, 1)))
    x = np.concatenate([rows(chunk, WIDE, 0) for chunk in range(2)])
    np.testing.assert_allclose(sums.sums["w"][0], np.square(x).sum(0), rtol=1e-6)


def test_a_chunk_may_come_in_several_passes() -> None:
    survey = surveyed()
    apart, whole = (
        MomentsCollector(survey.inputs, range(4)),
        MomentsCollector(survey.inputs, range(4)),
    )
    for chunk in range(2):
        for product in products(chunk):
            apart.add(product)
            whole.add(product)
        whole.end_chunk()
        whole.flush(ImatrixCollector())
    apart.end_chunk()
    apart.flush(ImatrixCollector())
    for number in range(4):
        assert np.array_equal(apart.sums[number].counts, whole.sums[number].counts)
        np.testing.assert_allclose(apart.sums[number].first, whole.sums[number].first, rtol=1e-6)
        one, other = (np.tril(each.sums[number].second) for each in (apart, whole))
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def shares(chunk: int) -> np.ndarray:
    """Of three heads, each query seeing itself and what stands before it, some by next to nothing."""
    found = np.random.default_rng((chunk, 9)).exponential(1, (3, TOKENS, TOKENS)) ** 40 * np.tri(
        TOKENS
    )
    made: np.ndarray = (found / found.sum(-1, keepdims=True)).astype(np.float32)
    return made


def test_values_have_the_moments_of_what_attention_mixes_however_many_threads_multiply() -> None:
    names, wide = ("blk.0.attn_q.weight", "blk.0.attn_v.weight"), 300  # more than a band
    survey = InputSurvey(TOKENS)
    made: list[MomentsCollector] = []

    def read(chunk: int, listener: InputSurvey | MomentsCollector) -> None:
        for name in names:
            listener.add(
                WeightProduct(name, rows(chunk, wide, 0)[None, None], (1, 1), None, (1, chunk))
            )
        listener.add_mixture(AttentionMixture("kqv-0", shares(chunk)))

    read(0, survey)
    assert [(one.names, one.mixed) for one in survey.inputs] == [
        (names[:1], False),
        (names[1:], True),
    ]
    assert survey.chunks_per_product == 4
    with ThreadPoolExecutor(2) as pool:
        for each in (map, pool.map):
            made.append(MomentsCollector(survey.inputs, range(2)))
            for chunk in range(CHUNKS):
                read(chunk, made[-1])
                made[-1].end_chunk(each)
                if chunk in (3, CHUNKS - 1):
                    made[-1].flush(ImatrixCollector(), each)
    x = np.concatenate([rows(chunk, wide, 0) for chunk in range(CHUNKS)]).astype(np.float64)
    looks = [
        shares(chunk)[:, QUERY_STEP - 1 :: QUERY_STEP].astype(np.float64) for chunk in range(CHUNKS)
    ]
    mixed = np.concatenate([looks[chunk] @ rows(chunk, wide, 0) for chunk in range(CHUNKS)])
    mixed = mixed.reshape(-1, wide)
    for number, entered in enumerate((x, mixed)):
        one, other = (seconds.sums[number] for seconds in made)
        assert all(
            np.array_equal(getattr(one, key), getattr(other, key))
            for key in ("second", "first", "counts")
        )
        assert one.counts == len(entered)
        np.testing.assert_allclose(
            np.tril(one.second[0]), np.tril(entered.T @ entered), rtol=2e-5, atol=2e-3
        )
        np.testing.assert_allclose(one.first[0], entered.sum(0), rtol=1e-5, atol=1e-3)
