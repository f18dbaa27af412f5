"""A slow model is not taken for a stuck one, and a stuck one is found."""

import pytest

from llmcli.runtime.engine.watchdog import BASE_SECONDS, WatchedWork, limit_seconds


@pytest.mark.parametrize("rows", [1, 16, 128, 512, 2048])
@pytest.mark.parametrize("row_seconds", [1e-5, 1e-3, 0.05, 2.0, 10.0])
def test_a_pass_may_take_three_times_as_long_as_measured(rows: int, row_seconds: float) -> None:
    limit = limit_seconds(WatchedWork(rows, row_seconds))
    assert rows * row_seconds * 3 < limit
    assert limit <= BASE_SECONDS + 5 * rows * row_seconds


@pytest.mark.parametrize("rows", [1, 128, 512])
def test_the_first_pass_of_half_a_token_per_second_is_within_the_limit(rows: int) -> None:
    assert 2.0 * rows < limit_seconds(WatchedWork(rows, 0.0)) < 3600


def test_what_is_no_pass_is_soon_stuck() -> None:
    assert limit_seconds(WatchedWork(0, 5.0)) == limit_seconds(WatchedWork(0, 0.0)) == BASE_SECONDS
