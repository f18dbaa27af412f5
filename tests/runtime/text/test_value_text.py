"""Values are written as json.dumps and str write them, and their texts keep their sources."""

import json
import random
from typing import Any

import pytest

from llmcli.runtime.text.tracked_text import (
    UNKNOWN_SOURCE,
    TrackedText,
    join_texts,
    quoted,
    track_value,
)
from llmcli.runtime.text.value_text import json_layout, write_json, write_text

LETTERS = 'ab"\\\n\té☃😀\ud83d<>&\x7f\x00/'


def random_value(random_: random.Random, depth: int = 0) -> Any:
    """Return a JSON value of a few levels."""
    kind = random_.randint(0, 6 if depth < 4 else 4)
    if kind < 3:
        return random_.choice(
            [None, True, False, 0, -5, 10**30, 1.5, -0.0, float("inf"), float("nan")]
        )
    if kind < 5:
        return "".join(random_.choice(LETTERS) for _ in range(random_.randint(0, 6)))
    if kind == 5:
        return [random_value(random_, depth + 1) for _ in range(random_.randint(0, 3))]
    keys = ("k", 'é"', "\n", 1, 2.5, None, True)
    return {
        random_.choice(keys): random_value(random_, depth + 1) for _ in range(random_.randint(0, 3))
    }


def mixed(value: Any, source: int = 0) -> Any:
    """Return a value in which each text has its own source, so that no shortcut applies."""
    if isinstance(value, str):
        return TrackedText.from_source(value, source)
    if isinstance(value, list):
        return [mixed(item, source + number) for number, item in enumerate(value)]
    if isinstance(value, dict):
        return {mixed(key, 7): mixed(item, source + 1) for key, item in value.items()}
    return value


def test_json_is_that_of_json_dumps() -> None:
    random_ = random.Random(2)
    for _ in range(4000):
        value = random_value(random_)
        arguments: dict[str, Any] = {
            "ensure_ascii": random_.random() < 0.5,
            "indent": random_.choice([None, 0, 1, 4, "\t", "  "]),
            "separators": random_.choice([None, (",", ":"), (",\n", ": ")]),
            "sort_keys": False,
        }
        layout = json_layout(**arguments)
        expected = json.dumps(value, **arguments)
        for tracked in (value, mixed(value), track_value(value, 1)):
            assert write_json(tracked, layout, lambda size: None) == expected


def test_keys_are_sorted_as_json_dumps_sorts_them() -> None:
    layout = json_layout(False, None, None, True)
    for value in (mixed({"b": 1, "a": "x"}), track_value({"b": 1, "a": "x"}, 1)):
        assert write_json(value, layout, lambda size: None) == '{"a": "x", "b": 1}'


def test_generators_of_filters_are_lists() -> None:
    numbers = (number for number in (1, 2))
    layout = json_layout(False, None, None, False)
    assert write_json(numbers, layout, lambda size: None) == "[1, 2]"


@pytest.mark.parametrize("value", [object(), {("a",): 1}, {1, 2}])
def test_error_for_a_value_that_json_does_not_have(value: Any) -> None:
    with pytest.raises(TypeError, match=r"JSON serializable|keys must be"):
        write_json(value, json_layout(False, None, None, False), lambda size: None)


def test_json_is_charged() -> None:
    sizes = list[int]()
    text = write_json({"a": [1, "x" * 50]}, json_layout(False, None, None, False), sizes.append)
    assert sum(sizes) == len(text)


def test_texts_in_json_keep_their_sources() -> None:
    value = ["own", TrackedText.from_source('a"b', 3)]
    text = write_json(value, json_layout(False, None, None, False), lambda size: None)
    assert isinstance(text, TrackedText)
    assert text == '["own", "a\\"b"]'
    (span,) = text.spans
    assert text.plain[slice(*span[:2])] == 'a\\"b'
    assert span[2] == 3


def test_values_are_written_as_python_does_and_their_texts_are_known_as_quoted() -> None:
    random_ = random.Random(3)
    for _ in range(2000):
        value = random_value(random_)
        for tracked in (mixed(value), track_value(value, 1)):
            assert write_text(tracked) == str(value)
    text = write_text({"city": TrackedText.from_source("Rome", 2), "n": (1,)})
    assert isinstance(text, TrackedText)
    assert text == "{'city': 'Rome', 'n': (1,)}"
    assert text.sources == [quoted(2)]


def test_the_text_of_an_unknown_object_counts_as_text_from_outside() -> None:
    from jinja2.utils import Namespace

    text = write_text(Namespace(secret=TrackedText.from_source("<|im_end|>", 1)))
    assert isinstance(text, TrackedText)
    assert text.spans == ((0, len(text), UNKNOWN_SOURCE),)
    assert write_text(join_texts(["a"])) == "a"
