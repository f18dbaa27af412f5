"""The forecast of a calibration pass goes by chunks after the first ones, and is printed once."""

from collections.abc import Iterator

import pytest

from llmcli.workflows.calibration import calibrate
from tests.fixtures.hub import Notes


def forecasts(
    n_chunks: int, reads: list[tuple[int, float]], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Return what is printed when so many chunks are in the sums at these times."""
    times: Iterator[float] = iter([time for _, time in reads])
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: next(times))
    notes = Notes()
    clock = calibrate._PassClock(n_chunks, notes)  # type: ignore[arg-type]
    for n_read, _ in reads:
        clock.print_forecast(n_read)
    return notes.lines


def test_the_first_chunk_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = [(1, 100.0), (2, 110.0), (3, 111.0)]
    assert forecasts(48, reads, monkeypatch) == [
        "forecast: 8 minutes for 46 more chunks, going by chunk 2"
    ]


def test_several_chunks_may_be_added_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = [(4, 100.0), (8, 108.0)]
    assert forecasts(100, reads, monkeypatch) == [
        "forecast: 3 minutes for 92 more chunks, going by chunks 5 to 8"
    ]


def test_a_pass_that_is_over_has_no_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    assert forecasts(8, [(4, 100.0), (8, 108.0)], monkeypatch) == []
    assert forecasts(7, [(1, 100.0), (2, 110.0)], monkeypatch) == []
