"""Regular expressions of JSON Schema in llguidance's syntax. The package regex is the oracle."""

import itertools
import json

import pytest
import regex

from llmcli.runtime.constraint.base import accepts
from llmcli.runtime.constraint.json_schema.patterns import (
    UnsupportedPattern,
    exclude_strings,
    translate_pattern,
)
from tests.runtime.constraint.words import schema


def all_texts(alphabet: str, length: int) -> list[str]:
    """Return all texts of these letters with at most `length` letters."""
    return [
        "".join(letters)
        for size in range(length + 1)
        for letters in itertools.product(alphabet, repeat=size)
    ]


def matching(pattern: str, texts: list[str]) -> set[str]:
    """Return the texts that the grammar of a string with this pattern accepts."""
    grammar = schema({"type": "string", "pattern": pattern}, is_strict=True)
    encoded = {text: list(json.dumps(text, ensure_ascii=False).encode()) for text in texts}
    return {text for text, tokens in encoded.items() if accepts(grammar, tokens)}


@pytest.mark.parametrize(
    ("pattern", "python", "alphabet"),
    [
        (r"^(?!\.)(?!.*\.\.)[a-z.]*$", None, "ab."),
        (r"^(?=.*[a-z])(?=.*\d).{2,}$", None, "a1-"),
        ("^(?!abc)[abc]*$", None, "abc"),
        ("^(?!abc$)[abc]*$", None, "abc"),
        ("^(?!(?:ab|b)$)[abc]*$", None, "abc"),
        ("^(?!.*aba)[ab]*$", None, "ab"),
        ("^(?!.*abac)[abc]*$", None, "abc"),
        ("^(?!.*--)[a-]*$", None, "a-"),
        ("a*?b", None, "ab"),
        (r"^[\w-.]+$", r"^[\w.-]+$", "a-.,"),
        ("^[a&&b]$", "^[ab&]$", "ab&"),
        ("^[[a]$", r"^[\[a]$", "ab["),
        ("^{a$", r"^\{a$", "{a"),
        ("^a{,2}$", r"^a\{,2\}$", "a{,2}"),
        ("^a{1,2}$", None, "ab"),
        ("^(?<n>a)(b)$", "^ab$", "ab"),
        (r"^[^\s\d]$", None, "a 1"),
        ("^[a-c-e]$", None, "abcde-"),
        (r"^[\d-x]$", r"^[\dx-]$", "1x-"),
        ("^#[0-9a-f]~$", None, "#0~"),
        ("^a$|^b$", None, "ab"),
        (r"^\u0061\x62\u{63}$", "^abc$", "abc"),
        (r"\Aa+\Z", None, "ab"),
        (r"^\cJ$", "^\n$", "\na"),
        (r"^[\b]$", "^\b$", "\ba"),
        ("^[^]$", r"^[\s\S]$", "a\n"),
        ("^.$", "^[^\n\r\u2028\u2029]$", "a\n\r\u2028"),
        (r"^\s$", "^[\\s\ufeff]$", "a \t\ufeff\u2003"),
        (r"^\p{Lu}$", None, "aAÄ1"),
    ],
)
def test_translation_matches_the_same_texts(
    pattern: str, python: str | None, alphabet: str
) -> None:
    texts = all_texts(alphabet, 5 if len(alphabet) < 4 else 3)
    oracle = regex.compile((python or pattern).replace("$", "\\Z"))
    assert matching(pattern, texts) == {text for text in texts if oracle.search(text)}


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"^(a)\1$", r"\1"),
        (r"\bx", r"\b"),
        ("a(?=b)", "a lookahead or lookbehind"),
        ("(?<=a)b", "a lookahead or lookbehind"),
        ("^(?=a)b|c", "a lookahead before alternatives"),
        ("^(?!.*a$)b", "a lookahead for the end of a text"),
        ("^(?!a+)b", "a lookahead"),
        ("^a++$", "a possessive repetition"),
        ("[a", "an unclosed class"),
        ("a\\", "a backslash at the end"),
        (r"\ud800", "half a character"),
        ("^(?=a", "an unclosed group"),
        ("(?m)^a$", "the flags m"),
    ],
)
def test_pattern_that_no_grammar_can_follow_has_a_reason(pattern: str, reason: str) -> None:
    with pytest.raises(UnsupportedPattern) as refused:
        translate_pattern(pattern)
    assert str(refused.value) == reason


def test_all_texts_but_some_are_matched() -> None:
    texts = all_texts("ab.", 4)
    for excluded in (["a", "ab", "ba", ""], ["aba"], ["a.b", "."]):
        grammar = schema({"type": "string", "not": {"enum": excluded}}, is_strict=True)
        found = [text for text in texts if accepts(grammar, list(json.dumps(text).encode()))]
        assert found == [text for text in texts if text not in excluded]
    with pytest.raises(UnsupportedPattern):
        exclude_strings(["x" * 5000])
