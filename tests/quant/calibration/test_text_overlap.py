"""The share of one text that is in another, estimated from samples, against a count of windows."""

import random

import pytest

from quant.calibration.text_overlap import (
    SAMPLE_SIZE,
    WINDOW_BYTES,
    merge_samples,
    overlap,
    sample_windows,
)


def words(count: int, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefghij", k=rng.randint(2, 9))) for _ in range(count))


def exact_overlap(text: str, other: str) -> float:
    def windows(content: str) -> set[bytes]:
        data = " ".join(content.casefold().split()).encode()
        return {data[at : at + WINDOW_BYTES] for at in range(len(data) - WINDOW_BYTES + 1)}

    return len(windows(text) & windows(other)) / len(windows(text))


@pytest.mark.parametrize("size", [300, 30_000])
@pytest.mark.parametrize("shared", [0.0, 0.02, 0.5, 1.0])
def test_the_estimate_is_near_the_counted_share(size: int, shared: float) -> None:
    common = words(round(size * shared), 1)
    text = f"{common} {words(round(size * (1 - shared)), 2)}"
    other = f"{words(size * 2, 3)} {common} {words(size, 4)}"
    estimate = overlap(sample_windows([text]), sample_windows([other]))
    assert estimate == pytest.approx(exact_overlap(text, other), abs=0.02)


def test_case_line_breaks_and_the_position_do_not_matter() -> None:
    text = words(500, 5)
    other = "x" * 13 + " " + text.upper().replace(" ", "\n\n  ")
    assert overlap(sample_windows([text]), sample_windows([other])) == 1.0


def test_samples_of_parts_are_merged() -> None:
    parts = [words(9000, seed) for seed in range(4)]
    samples = [sample_windows([part]) for part in parts]
    assert merge_samples(samples) == sample_windows(parts)
    assert len(samples[0]) == SAMPLE_SIZE


def test_a_long_text_is_hashed_in_parts_without_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    text = words(400, 6)
    whole = sample_windows([text])
    monkeypatch.setattr("quant.calibration.text_overlap.PART_BYTES", 100)
    assert sample_windows([text]) == whole


def test_a_text_without_a_window_has_no_known_overlap() -> None:
    assert overlap(sample_windows(["too short"]), sample_windows([words(100, 7)])) is None
    assert overlap(sample_windows([words(100, 7)]), ()) is None
