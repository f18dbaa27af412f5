"""Bytes to text: incomplete characters and possible stop strings are held back."""

import random

import pytest

from llmcli.runtime.text.detokenizer import Detokenizer


def test_incomplete_character_is_held_back():
    decoder = Detokenizer()
    assert [decoder.feed(bytes([byte])) for byte in "é€".encode()] == ["", "é", "", "", "€"]


def test_incomplete_character_at_the_end_becomes_a_replacement_character():
    decoder = Detokenizer()
    assert decoder.feed(b"ab\xe2\x82") == "ab"
    assert decoder.finish() == "\ufffd"


def test_possible_stop_string_is_held_back_and_released_if_it_is_none():
    decoder = Detokenizer(("STOP",))
    assert decoder.feed(b"go ST") == "go "
    assert decoder.feed(b"ART") == "START"
    assert not decoder.is_stopped


def test_text_ends_before_a_stop_string():
    decoder = Detokenizer(("</end>",))
    shown = (
        decoder.feed(b"well</e") + decoder.feed(b"nd>more") + decoder.feed(b"!") + decoder.finish()
    )
    assert (shown, decoder.is_stopped) == ("well", True)


@pytest.mark.parametrize("seed", range(50))
def test_text_does_not_depend_on_the_division_of_the_bytes(seed):
    rng = random.Random(seed)
    text = "".join(rng.choice("ab\u00e9\u4e16\U0001f600 ") for _ in range(40)) + "xyz tail"
    raw, pieces = text.encode(), []
    while raw:
        cut = rng.randint(1, 4)
        pieces.append(raw[:cut])
        raw = raw[cut:]
    decoder = Detokenizer(("xyz",))
    assert "".join(map(decoder.feed, pieces)) + decoder.finish() == text.split("xyz")[0]
