"""Bytes to text: partial characters are never shown."""

import random

import pytest

from llmcli.runtime.text.detokenizer import Detokenizer


def test_half_a_character_waits_for_its_other_half():
    decoder = Detokenizer()
    assert [decoder.feed(bytes([byte])) for byte in "é€".encode()] == ["", "é", "", "", "€"]


def test_an_unfinished_character_at_the_end_is_shown_as_one_replacement():
    decoder = Detokenizer()
    assert decoder.feed(b"ab\xe2\x82") == "ab"
    assert decoder.finish() == "\ufffd"


def test_text_that_may_become_a_stop_string_is_held_back_and_released_when_it_does_not():
    decoder = Detokenizer(("STOP",))
    assert decoder.feed(b"go ST") == "go "
    assert decoder.feed(b"ART") == "START"
    assert not decoder.is_stopped


def test_a_stop_string_ends_the_text_before_it_and_nothing_after_it_is_shown():
    decoder = Detokenizer(("</end>",))
    shown = (
        decoder.feed(b"well</e") + decoder.feed(b"nd>more") + decoder.feed(b"!") + decoder.finish()
    )
    assert (shown, decoder.is_stopped) == ("well", True)


@pytest.mark.parametrize("seed", range(50))
def test_any_split_of_the_bytes_gives_the_same_text(seed):
    rng = random.Random(seed)
    text = "".join(rng.choice("ab\u00e9\u4e16\U0001f600 ") for _ in range(40)) + "xyz tail"
    raw, pieces = text.encode(), []
    while raw:
        cut = rng.randint(1, 4)
        pieces.append(raw[:cut])
        raw = raw[cut:]
    decoder = Detokenizer(("xyz",))
    assert "".join(map(decoder.feed, pieces)) + decoder.finish() == text.split("xyz")[0]
