"""WordWrapper on the screen of an emulated terminal."""

import itertools
import random
import re

import pytest

from llmcli.word_wrap import WordWrapper, character_columns, text_columns, wrap_text
from scripts.transcript.terminal import TerminalScreen

WIDTHS = (40, 60, 80, 140)
ENGLISH = (
    "The extraordinarily conscientious lighthouse keeper described, in considerable detail, the "
    "phases of the Moon; and then (unfortunately for everybody) he described them again. "
)
CHINESE = (
    "月球是地球唯一的天然卫星，它的引力引起了潮汐（也叫“海潮”）。古代的人用月相来计算日子，所以"
    "一个月大约有三十天。 "
)
EMOJI = "Thumbs up 👍🏽👍🏽👍🏽, families 👨‍👩‍👧‍👦👨‍👩‍👧‍👦, flags 🇩🇪🇫🇷🇯🇵, hearts ❤️❤️ and rockets 🚀🚀🚀🚀 land together. "
KOREAN = "달은 지구의 유일한 자연 위성이며 그 중력은 조수를 일으킵니다. "
TEXT = ENGLISH + CHINESE + EMOJI + KOREAN + ENGLISH + EMOJI + CHINESE


def show(text: str, width: int, seed: int = 0, moves_cursor: bool = True) -> list[str]:
    """Return the lines of a terminal that gets `text` in pieces of one to five characters."""
    screen, numbers, start = TerminalScreen(width, 200), random.Random(seed), 0
    wrapper = WordWrapper(lambda: width, moves_cursor)
    while start < len(text):
        size = numbers.randint(1, 5)
        screen.write(wrapper.feed(text[start : start + size]).replace("\n", "\r\n"))
        start += size
    screen.write(wrapper.finish())
    return screen.text().split("\n")[:-1]


def broken_words(text: str, lines: list[str]) -> list[str]:
    """Return the words of `text` that the line breaks divide, by Python's idea of a word: letters
    of other scripts than Chinese. Assert that the lines contain the text.
    """
    assert "".join("".join(lines).split()) == "".join(text.split())
    words, position = [], 0
    for line in lines[:-1]:
        for character in "".join(line.split()):
            position = text.index(character, position) + 1
        around = text[max(0, position - 1) : position + 1]
        if re.fullmatch(
            r"[^\W\d_\u3000-\u9fff]{2}|.[\u200d\ufe0f\U0001f3fb-\U0001f3ff]|\u200d.", around
        ):
            words.append(text[max(0, position - 8) : position + 8])
    return words


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("moves_cursor", [True, False])
def test_no_word_is_broken_while_a_text_streams(width: int, moves_cursor: bool) -> None:
    for seed in range(5):
        lines = show(TEXT, width, seed, moves_cursor)
        assert broken_words(TEXT, lines) == []
        assert max(map(text_columns, lines)) < width
        # No line is much shorter than it must be: the next word would not have fit.
        for line, following in itertools.pairwise(lines):
            word = re.split(r"[\s\u3000-\u9fff（“]", following)[0]
            assert text_columns(line) + 1 + text_columns(word or following[:1]) >= width - 5


def test_the_terminal_alone_breaks_words() -> None:
    screen = TerminalScreen(40, 200)
    screen.write(TEXT)
    assert broken_words(TEXT, screen.text().split("\n")[:-1]) != []


@pytest.mark.parametrize("width", WIDTHS)
def test_a_text_in_one_piece_and_in_pieces_looks_the_same(width: int) -> None:
    screen = TerminalScreen(width, 200)
    screen.write(WordWrapper(lambda: width).feed(TEXT).replace("\n", "\r\n"))
    expected = [line.rstrip() for line in screen.text().split("\n")[:-1]]
    assert show(TEXT, width) == expected
    assert [line.rstrip() for line in wrap_text(TEXT, width).split("\n")] == expected


def test_code_keeps_its_lines() -> None:
    code = 'print("a line of code that is longer than the forty columns of the terminal")'
    for block in (f"```python\n{code}\n```", f"~~~\n{code}\n~~~", f"    {code}"):
        wrapper = WordWrapper(lambda: 40, moves_cursor=False)
        wrapped = wrapper.feed(f"{ENGLISH}\n\n{block}\n\n{ENGLISH}") + wrapper.finish()
        before, after = wrapped.split(block)
        for text in (before, after):
            assert broken_words(ENGLISH, text.strip().split("\n")) == []
            assert max(map(len, text.split("\n"))) < 40


def test_an_indented_list_item_is_no_code() -> None:
    text = "- first\n\n    and a paragraph of the item that is longer than forty columns of a line"
    assert all(len(line) < 40 for line in show(text, 40))


def test_a_word_that_is_longer_than_a_line_stays_whole_for_copying() -> None:
    address = "https://example.org/" + "path/" * 20
    wrapper = WordWrapper(lambda: 40, moves_cursor=False)
    out = wrapper.feed(f"See {address} for more.") + wrapper.finish()
    assert out == f"See \n{address}\nfor more."
    lines = show(f"See {address} for more.", 40)  # the terminal divides it at its edge
    assert (lines[0], lines[-1]) == ("See", "for more.")
    assert all(len(line) == 40 for line in lines[1:3])
    assert wrap_text(address, 40, divides_words=True).split("\n")[0] == address[:39]


def test_styles_take_no_columns_and_stay_with_their_word() -> None:
    dimmed = "".join(f"\x1b[2m{piece}\x1b[0m" for piece in ("pha", "ses ", "of the mo", "on"))
    for moves_cursor in (False, True):
        wrapper = WordWrapper(lambda: 14, moves_cursor)
        out = wrapper.feed(dimmed) + wrapper.finish()
        screen = TerminalScreen(14, 10)
        screen.write(out.replace("\n", "\r\n"))
        assert screen.text() == "phases of the\nmoon\n"
        assert out.endswith("\nmo\x1b[0m\x1b[2mon\x1b[0m")


def test_white_space_at_the_edge_does_not_begin_a_line() -> None:
    for count in range(1, 12):
        lines = show("x" * 30 + " " * count + "word " * 10, 40)
        assert all(line == line.strip() for line in lines[1:])


def test_a_tab_goes_to_its_column() -> None:
    wrapper = WordWrapper(lambda: 80)
    assert wrapper.feed("a\tb") == "a\tb"
    assert wrapper._column == 9


def test_a_line_of_plain_text_has_no_escape_sequences() -> None:
    assert (
        WordWrapper(lambda: 80).feed("Ein Satz, der paßt. 短文。") == "Ein Satz, der paßt. 短文。"
    )
    assert WordWrapper(lambda: 9).feed("two words") == "two word\x1b[4D\x1b[K\nwords"


def test_the_width_may_change_during_a_text() -> None:
    widths = iter([80] * 5 + [40] * 1000)
    wrapper = WordWrapper(lambda: next(widths), moves_cursor=False)
    out = "".join(wrapper.feed(word + " ") for word in ENGLISH.split()) + wrapper.finish()
    assert " ".join(out.split()) == ENGLISH.strip()


@pytest.mark.parametrize(
    ("character", "columns"),
    [("a", 1), ("漢", 2), ("한", 2), ("😀", 2), ("\u0301", 0), ("\u200d", 0), ("🇩", 2), ("é", 1)],
)
def test_columns_of_a_character(character: str, columns: int) -> None:
    assert character_columns(character) == columns
