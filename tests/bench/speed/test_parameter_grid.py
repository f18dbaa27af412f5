"""Lists of parameter values in llama-bench's notation, and the tests of their combinations."""

import pytest

from llmcli.bench.speed.parameter_grid import ParameterGrid, parse_numbers, parse_pairs, parse_words
from llmcli.errors import UserError


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        (["512"], [512]),
        (["1,2,4"], [1, 2, 4]),
        (["1-4"], [1, 2, 3, 4]),
        (["0-10+5"], [0, 5, 10]),
        (["1-8*2"], [1, 2, 4, 8]),
        (["1", "2,3"], [1, 2, 3]),
    ],
)
def test_lists_ranges_and_repeated_flags_are_parsed(texts, values):
    assert parse_numbers("-p", texts) == values


@pytest.mark.parametrize(
    "text", ["", "x", "1-", "-5", "1,,2", "0-8*2", "9-1", "1-5+0", "1.5", "99999999999"]
)
def test_an_invalid_number_is_a_user_error(text):
    with pytest.raises(UserError, match="-p") as caught:
        parse_numbers("-p", [text])
    assert caught.value.hint


def test_numbers_above_the_maximum_are_refused():
    assert parse_numbers("-t", ["512"], 1, 512) == [512]
    with pytest.raises(UserError, match="-t is 513"):
        parse_numbers("-t", ["512,513"], 1, 512)


def test_pairs_and_words_are_parsed():
    assert parse_pairs(["512,128"]) == [(512, 128)]
    assert parse_words("-fa", ["on,0"], ["auto", "off", "on"]) == ["on", "off"]
    for wrong in ("512", "1,2,3"):
        with pytest.raises(UserError, match="-pg"):
            parse_pairs([wrong])
    with pytest.raises(UserError, match="f17"):
        parse_words("-ctk", ["f17"], ["f16"])


def test_the_grid_yields_all_combinations():
    grid = ParameterGrid(
        [64], [8], [(16, 4)], [0, 32], [512], [512], ["f16"], ["f16"], [1, 2], [-1], ["auto"]
    )
    tests = list(grid.tests())
    assert len(tests) == 3 * 2 * 2
    assert [test.name for test in tests[:6]] == [
        "pp64",
        "tg8",
        "pp16+tg4",
        "pp64 @ d32",
        "tg8 @ d32",
        "pp16+tg4 @ d32",
    ]
