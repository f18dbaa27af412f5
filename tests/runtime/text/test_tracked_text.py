"""Every operation on a TrackedText gives str's result, and each character keeps its source."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from llmcli.runtime.text.tracked_text import (
    UNKNOWN_SOURCE,
    TrackedText,
    attribute_all,
    join_texts,
    quoted,
    track,
)

# Texts from outside have other letters than the template's own, so that the letters of a result
# show where its spans must be.
OWN_LETTERS, OUTSIDE_LETTERS = "ab", "XYß"
SHARED = " \n-\t"
SEPARATORS = ("-", "a", "X", " ", "\n", "b", "Xa", "--", "ab", " -")


def random_text(random_: random.Random) -> TrackedText:
    """Return a short text with up to three sources."""
    pieces = list[str]()
    for _ in range(random_.randint(0, 5)):
        own = random_.random() < 0.5
        letters = (OWN_LETTERS if own else OUTSIDE_LETTERS) + SHARED
        piece = "".join(random_.choice(letters) for _ in range(random_.randint(0, 4)))
        pieces.append(piece if own else TrackedText.from_source(piece, random_.randint(0, 2)))
    return track(join_texts(pieces))


def check_spans(text: str) -> None:
    """Require spans in order, around the letters from outside and not around the template's."""
    assert isinstance(text, TrackedText)
    for (start, end, _), (next_start, _, _) in itertools.pairwise(
        [(0, 0, 0), *text.spans, (len(text), len(text), 0)]
    ):
        assert 0 <= start <= end <= next_start
    inside = {index for start, end, _ in text.spans for index in range(start, end)}
    for index, letter in enumerate(text.plain):
        if letter in OUTSIDE_LETTERS or letter in OWN_LETTERS:
            assert (letter in OUTSIDE_LETTERS) == (index in inside), (text.plain, text.spans)


OPERATIONS: dict[str, Callable[[random.Random], tuple[Any, ...]]] = {
    "strip": lambda random_: random_.choice([(), ("- ",), (None,)]),
    "lstrip": lambda random_: random_.choice([(), ("- ",), (None,)]),
    "rstrip": lambda random_: random_.choice([(), ("- ",), (None,)]),
    "split": lambda random_: (random_.choice([None, *SEPARATORS]), random_.randint(-1, 3)),
    "rsplit": lambda random_: (random_.choice([None, *SEPARATORS]), random_.randint(-1, 3)),
    "splitlines": lambda random_: (random_.random() < 0.5,),
    "partition": lambda random_: (random_.choice(SEPARATORS),),
    "rpartition": lambda random_: (random_.choice(SEPARATORS),),
    "removeprefix": lambda random_: (random_.choice(SEPARATORS),),
    "removesuffix": lambda random_: (random_.choice(SEPARATORS),),
    "center": lambda random_: (random_.randint(0, 20),),
    "ljust": lambda random_: (random_.randint(0, 20),),
    "rjust": lambda random_: (random_.randint(0, 20), "-"),
    "expandtabs": lambda random_: (1,),
    "__add__": lambda random_: ("ab",),
    "__radd__": lambda random_: ("ab",),
    "__mul__": lambda random_: (random_.randint(0, 3),),
    "__getitem__": lambda random_: (
        slice(*(random_.choice([None, *range(-9, 9)]) for _ in range(2))),
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_give_the_result_of_str_with_the_sources_of_its_letters(name: str) -> None:
    random_ = random.Random(name)
    for _ in range(3000):
        text, arguments = random_text(random_), OPERATIONS[name](random_)
        result = getattr(text, name)(*arguments)
        expected = (
            "ab" + text.plain if name == "__radd__" else getattr(text.plain, name)(*arguments)
        )
        assert result == expected
        for part in result if isinstance(result, (list, tuple)) else [result]:
            if part:
                check_spans(part)


def test_replace_gives_the_result_of_str_and_no_text_from_outside_becomes_the_templates_own() -> (
    None
):
    random_ = random.Random(5)
    for _ in range(5000):
        text, old = random_text(random_), random_.choice(SEPARATORS)
        new, count = random_.choice(["", "-", random_text(random_)]), random_.randint(-1, 3)
        result = text.replace(old, new, count)
        assert result == text.plain.replace(old, str.__str__(new), count)
        inside = {index for a, b, _ in result.spans for index in range(a, b)}
        assert all(
            index in inside for index, letter in enumerate(result) if letter in OUTSIDE_LETTERS
        )


def test_letters_that_change_their_number_count_as_text_from_outside() -> None:
    text = join_texts(["<b>", TrackedText.from_source("straße", 3), "</b>"])
    assert isinstance(text, TrackedText)
    upper = text.upper()
    assert (upper, upper.spans) == ("<B>STRASSE</B>", ((3, 10, 3),))
    assert text.title() == text.plain.title()


def test_iterating_and_joining_keep_the_sources() -> None:
    text = track(join_texts(["a", TrackedText.from_source("XY", 1)]))
    assert [letter.spans for letter in text] == [(), ((0, 1, 1),), ((0, 1, 1),)]
    joined = join_texts(list(text), "-")
    assert isinstance(joined, TrackedText)
    assert (joined.plain, joined.spans) == ("a-X-Y", ((2, 3, 1), (4, 5, 1)))
    assert join_texts(["a", "b"], "-") == "a-b"
    assert not isinstance(join_texts(["a", "b"]), TrackedText)
    assert join_texts(
        ["", TrackedText.from_source("X", 2)], TrackedText.from_source(", ", 4)
    ).spans == (  # type: ignore[attr-defined]
        (0, 2, 4),
        (2, 3, 2),
    )


def test_text_that_jinja_escaped_counts_as_text_from_outside() -> None:
    from markupsafe import Markup

    joined = join_texts(["<b>", Markup("x")])
    assert isinstance(joined, TrackedText)
    assert joined.spans == ((3, 4, UNKNOWN_SOURCE),)


def test_attribute_all_gives_every_source_a_part() -> None:
    assert attribute_all("abcd", [5, 7]).spans == ((0, 1, 5), (1, 4, 7))
    assert attribute_all("a", [5, 7]).spans == ((0, 1, 5),)
    assert attribute_all("", [5]).spans == ()
    assert quoted(quoted(4)) == 4
