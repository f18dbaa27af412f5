"""Long texts are split after control tokens; the ids equal those of the whole text."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmcli.runtime.binding import model as binding
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.binding.tokens import tokenize_splits

VOCABULARIES = Path(__file__).parents[4] / "shared" / "assets" / "vocab"
NAMES = "gpt-2", "qwen2", "deepseek-llm", "llama-spm"
WORDS = (
    "Hello",
    " ",
    "  ",
    "\n",
    "<",
    "<|",
    "</",
    "é",
    "漢字",
    "😀",
    "a<b",
    "<|im_start|",
    "[",
    "x" * 30,
)


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    """A model file that contains only a vocabulary."""
    path = VOCABULARIES / f"ggml-vocab-{request.param}.gguf"
    if not path.exists():
        pytest.skip(f"{path.name} is missing")
    with open_model(path, vocab_only=True) as found:
        yield found


@pytest.mark.parametrize("special", [True, False])
def test_a_text_in_parts_has_the_tokens_of_the_whole_text(
    model: Model, special: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(7)
    names = sorted(text.decode() for text in model._splits._special_tokens)
    assert names
    n_cut = 0
    for _ in range(100):
        text = "".join(rng.choice((*names[:20], *WORDS)) for _ in range(rng.randrange(1, 60)))
        whole = model.tokenize(text, special=special, add_special=True)
        with monkeypatch.context() as patch:
            size = rng.choice((1, 9, 40))
            patch.setattr(binding, "SLICE_BYTES", size)
            patch.setattr(tokenize_splits, "SLICE_BYTES", size)
            assert model.tokenize(text, special=special, add_special=True) == whole, text
            parts = list(model._splits.split_text(text.encode(), special))
        assert b"".join(parts) == text.encode()
        n_cut += len(parts) > 1
        assert model.min_tokens(text) <= len(whole)
    assert n_cut or not special  # without control tokens there may be no place to cut


def test_a_growing_text_is_tokenized_from_its_last_kept_part_on(
    stories_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(8)
    monkeypatch.setattr(binding, "SLICE_BYTES", 200)
    monkeypatch.setattr(tokenize_splits, "SLICE_BYTES", 200)
    with open_model(stories_gguf, vocab_only=True) as model:
        tokenize_bytes, computed = model._tokenize_bytes, list[int]()

        def count_and_tokenize(raw: bytes, *flags: bool) -> list[int]:
            computed.append(len(raw))
            return tokenize_bytes(raw, *flags)

        monkeypatch.setattr(model, "_tokenize_bytes", count_and_tokenize)
        model.keep_parts()
        names = sorted(text.decode() for text in model._splits._special_tokens)
        text = ""
        for _ in range(60):
            text += rng.choice(names) + "".join(rng.choices(WORDS, k=12))
            for special in (True, False):
                whole = tokenize_bytes(text.encode(), True, special)
                assert model.tokenize(text, special=True, add_special=special) == whole, text
        # without kept parts, the mean text would be tokenized 120 times
        assert sum(computed) < 120 * len(text) / 2 / 4


def test_the_lower_bound_of_a_text_of_longest_tokens_is_their_number(model: Model) -> None:
    longest = max(range(model.n_vocab), key=lambda token: len(model.piece(token, special=True)))
    assert (
        model.min_tokens(model.piece(longest, special=True).decode("utf-8", "replace") * 50) >= 50
    )


class Library:
    """The functions of llama.cpp that TokenizeSplits calls, for a vocabulary of (text, attributes)
    tokens.
    """

    def __init__(self, *tokens: tuple[bytes, int]) -> None:
        self.tokens = tokens

    def llama_vocab_get_attr(self, vocab: object, token: int) -> int:
        return self.tokens[token][1]

    def llama_vocab_get_text(self, vocab: object, token: int) -> bytes:
        return self.tokens[token][0]


def test_no_cut_is_made_after_overlapping_tokens_or_tokens_that_strip_spaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = Library(
        (b"<a>", tokenize_splits.CONTROL_ATTR),
        (b"<a><b>", tokenize_splits.CONTROL_ATTR),
        (b"<s>", tokenize_splits.CONTROL_ATTR | tokenize_splits.STRIP_ATTRS),
        (b"<u>", tokenize_splits.USER_ATTR),
        (b"<c>", tokenize_splits.CONTROL_ATTR),
        (b"plain", 4),
    )
    monkeypatch.setattr(tokenize_splits, "lib", lambda: library)
    monkeypatch.setattr(tokenize_splits, "SLICE_BYTES", 1)
    found = tokenize_splits.TokenizeSplits(None, len(library.tokens))
    assert found.strips_spaces
    assert list(found.split_text(b"x<a><b>y<s> z<u>v<c>w", special=True)) == [
        b"x<a><b>y<s> z<u>",
        b"v<c>",
        b"w",
    ]
    assert list(found.split_text(b"x<c>y<u>z", special=False)) == [b"x<c>y<u>", b"z"]
