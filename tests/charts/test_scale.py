import pytest

from llmcli.charts.scale import (
    Scale,
    axis_limits,
    format_number,
    format_ticks,
    linear_ticks,
    log_ticks,
)


@pytest.mark.parametrize(
    ("low", "high", "max_ticks", "expected"),
    [
        (0, 10, 6, [0, 2, 4, 6, 8, 10]),
        (0, 1, 5, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0, 4096, 5, [0, 1000, 2000, 3000, 4000]),
        (-3, 3, 4, [-2, 0, 2]),
        (0.95, 1.05, 5, [0.96, 0.98, 1.0, 1.02, 1.04]),
    ],
)
def test_linear_ticks_are_round_numbers_between_the_limits(low, high, max_ticks, expected):
    assert linear_ticks(low, high, max_ticks) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("low", "high", "max_ticks", "expected"),
    [
        (1, 1000, 6, [1, 10, 100, 1000]),
        (1, 100, 8, [1, 2, 5, 10, 20, 50, 100]),
        (2, 40, 4, [2, 5, 10, 20]),
        (1e-3, 1e9, 4, [1e-3, 10, 1e5, 1e9]),
        (4.1, 4.9, 4, [4.2, 4.4, 4.6, 4.8]),
    ],
)
def test_log_ticks_depend_on_the_length_of_the_range(low, high, max_ticks, expected):
    assert log_ticks(low, high, max_ticks) == pytest.approx(expected)


POSITIVE = ([5.0], [3, 3], [1e-9, 2e-9], [1e12, 3e12], [4, 4096])


@pytest.mark.parametrize(
    ("values", "log"),
    [
        *((values, log) for values in POSITIVE for log in (False, True)),
        ([0.0], False),
        ([0, 7.3], False),
        ([-2, 5], False),
    ],
)
def test_every_axis_includes_its_values_and_has_two_ticks(values, log):
    scale = Scale(*axis_limits(values, log), 0, 100, log)
    assert all(scale.contains(value) for value in values)
    assert all(0 <= scale(value) <= 100 for value in values)
    ticks = scale.ticks(6)
    assert 2 <= len(ticks) <= 12
    assert len(set(format_ticks(ticks))) == len(ticks)


@pytest.mark.parametrize("values", [[0.98, 1.0, 1.02], [1.0], [1.0, 1.0001], [0.5, 30]])
def test_an_axis_that_does_not_start_at_zero_has_limits_near_the_values(values):
    low, high = axis_limits(values, from_zero=False)
    assert low <= min(values) <= max(values) <= high
    assert high - low <= max(0.25, 1.7 * (max(values) - min(values)))
    assert len(Scale(low, high, 0, 1).ticks(5)) >= 2


def test_a_scale_maps_values_linearly_or_logarithmically():
    assert [Scale(0, 10, 0, 100)(v) for v in (0, 5, 10)] == [0, 50, 100]
    assert [Scale(1, 100, 200, 0, True)(v) for v in (1, 10, 100)] == pytest.approx([200, 100, 0])
    assert Scale(0, 10, 0, 100)(99) == 100


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0"),
        (4096, "4,096"),
        (5.25, "5.25"),
        (0.51239, "0.5124"),
        (1234567.8, "1,234,568"),
        (99.96, "99.96"),
        (12, "12"),
        (1e-9, "1e-09"),
        (-2.5, "-2.5"),
        (100.04, "100"),
    ],
)
def test_format_number(value, expected):
    assert format_number(value) == expected
