"""Compiled character rules (charsmap): compared with SentencePiece and tokenizers, and damaged."""

import random
import unicodedata
from pathlib import Path

import pytest
import tokenizers

from quant.tokenizer import charsmap, sentencepiece_model
from quant.tokenizer.verify import probe_strings

DATA = Path(__file__).parents[2] / "data" / "unigram"
RULES = {
    "ﬁ": "fi",
    "１": "1",
    "\t": " ",
    "e\u0301": "é",
    "e": "E",
    "ab": "x",
    "abc": "yy",
    "\u200b": "",
    "🙂": ":)",
}


def replace_longest_prefixes(rules: dict[str, str], text: str) -> str:
    """Return `text` with the rules applied: always the rule of the longest prefix."""
    result = ""
    while text:
        prefix = max((prefix for prefix in rules if text.startswith(prefix)), key=len, default="")
        result += rules[prefix] if prefix else text[0]
        text = text[len(prefix) or 1 :]
    return result


def test_longest_prefix_is_replaced() -> None:
    rules, rng = charsmap.parse_charsmap(charsmap.build_charsmap(RULES)), random.Random(0)
    for _ in range(500):
        text = "".join(
            rng.choice("abce\u0301\u0302ﬁ１\t\u200b🙂 é") for _ in range(rng.randrange(12))
        )
        assert rules.apply(text) == replace_longest_prefixes(RULES, text)


def test_tokenizers_library_reads_the_same_rules() -> None:
    chars = map(chr, (*range(1, 0xD800), *range(0xF900, 0x1F000)))
    folded = {char: unicodedata.normalize("NFKC", char) for char in chars}
    replacement = charsmap.build_charsmap(
        {char: replacement for char, replacement in folded.items() if replacement != char}
    )
    ours, theirs = (
        charsmap.parse_charsmap(replacement),
        tokenizers.normalizers.Precompiled(replacement),
    )
    for char, expected in folded.items():
        assert ours.apply(f"a{char}b") == f"a{expected}b"
        assert theirs.normalize_str(char) == expected


def test_rules_packed_by_sentencepiece_are_read() -> None:
    rules = charsmap.parse_charsmap(
        sentencepiece_model.load_sentencepiece(DATA / "tokenizer.model").charsmap
    )
    assert rules.apply("ﬁ\n①\u00a0e\u0301o\u0302\u0301") == "fi 1 éố"
    for text in probe_strings.PROSE:
        theirs = unicodedata.normalize("NFKC", text.translate({9: 32, 10: 32, 13: 32}))
        assert rules.apply(text) == theirs, text


@pytest.mark.parametrize(
    "step", [str.upper, str.lower, lambda text: "".join(f"<{char}>" for char in text)]
)
def test_append_step_composes_rules(step) -> None:
    letters, rng = "abceE\u0301\u0302ﬁ１\t\u200b🙂 éÉ漢", random.Random(0)
    composed = {
        prefix: step(replacement)
        for prefix, replacement in ({char: char for char in letters} | RULES).items()
    }
    rules = charsmap.parse_charsmap(
        charsmap.append_step(charsmap.build_charsmap(RULES), step, letters)
    )
    for _ in range(500):
        text = "".join(rng.choice(letters) for _ in range(rng.randrange(12)))
        assert rules.apply(text) == replace_longest_prefixes(composed, text)


def test_damaged_rules_are_refused_or_applied_safely() -> None:
    data, rng, refused = (
        sentencepiece_model.load_sentencepiece(DATA / "tokenizer.model").charsmap,
        random.Random(0),
        0,
    )
    for _ in range(400):
        broken = (
            bytearray(data[: rng.randrange(1, len(data))])
            if rng.random() < 0.1
            else bytearray(data)
        )
        for _ in range(rng.choice((1, 1, 8))):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        try:
            rules = charsmap.parse_charsmap(bytes(broken))
        except ValueError:
            refused += 1
        else:
            for text in (*probe_strings.SCRIPTS, *probe_strings.MARKS):
                rules.apply(text)
    assert 40 < refused < 400


INVALID_CHARSMAPS = [b"", b"\1", bytes(9), b"\4\0\0\0\0\0\0\0a", b"\xff\xff\xff\xff" + bytes(20)]


@pytest.mark.parametrize("data", INVALID_CHARSMAPS)
def test_invalid_rules_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"bytes|leads"):
        charsmap.parse_charsmap(data)
