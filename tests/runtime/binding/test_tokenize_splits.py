"""Long texts are split after control tokens; the ids equal those of the whole text."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmcli.runtime.binding import model as binding
from llmcli.runtime.binding import tokenize_splits
from llmcli.runtime.binding.model import Model, open_model

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
    """A vocabulary without a model."""
    path = VOCABULARIES / f"ggml-vocab-{request.param}.gguf"
    if not path.exists():
        pytest.skip(f"{path.name} is not here")
    with open_model(path, vocab_only=True) as found:
        yield found


@pytest.mark.parametrize("special", [True, False])
def test_parts_have_the_tokens_of_the_whole(
    model: Model, special: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(7)
    ends = sorted(text.decode() for text in model._seams._special)
    assert ends
    cut = 0
    for _ in range(100):
        text = "".join(rng.choice((*ends[:20], *WORDS)) for _ in range(rng.randrange(1, 60)))
        whole = model.tokenize(text, special=special, add_special=True)
        with monkeypatch.context() as patched:
            size = rng.choice((1, 9, 40))
            patched.setattr(binding, "SLICE_BYTES", size)
            patched.setattr(tokenize_splits, "SLICE_BYTES", size)
            assert model.tokenize(text, special=special, add_special=True) == whole, text
            parts = list(model._seams.split_text(text.encode(), special))
        assert b"".join(parts) == text.encode()
        cut += len(parts) > 1
        assert model.min_tokens(text) <= len(whole)
    assert cut or not special  # without control tokens there may be nothing to cut at


def test_the_least_number_of_tokens_is_told(model: Model) -> None:
    longest = max(range(model.n_vocab), key=lambda token: len(model.piece(token, special=True)))
    assert (
        model.min_tokens(model.piece(longest, special=True).decode("utf-8", "replace") * 50) >= 50
    )


class Library:
    """Of llama.cpp what Seams asks for: (text, attributes) by token."""

    def __init__(self, *tokens: tuple[bytes, int]) -> None:
        self.tokens = tokens

    def llama_vocab_get_attr(self, vocab: object, token: int) -> int:
        return self.tokens[token][1]

    def llama_vocab_get_text(self, vocab: object, token: int) -> bytes:
        return self.tokens[token][0]


def test_nothing_is_cut_where_another_token_may_begin_or_space_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = Library(
        (b"<a>", tokenize_splits.CONTROL_ATTR),
        (b"<a><b>", tokenize_splits.CONTROL_ATTR),
        (b"<s>", tokenize_splits.CONTROL_ATTR | tokenize_splits.STRIP_ATTRS),
        (b"<u>", tokenize_splits.USER_ATTR),
        (b"<c>", tokenize_splits.CONTROL_ATTR),
        (b"plain", 4),
    )
    monkeypatch.setattr(tokenize_splits, "lib", lambda: known)
    monkeypatch.setattr(tokenize_splits, "SLICE_BYTES", 1)
    found = tokenize_splits.TokenizeSplits(None, len(known.tokens))
    assert found.strips_spaces
    assert list(found.split_text(b"x<a><b>y<s> z<u>v<c>w", special=True)) == [
        b"x<a><b>y<s> z<u>",
        b"v<c>",
        b"w",
    ]
    assert list(found.split_text(b"x<c>y<u>z", special=False)) == [b"x<c>y<u>", b"z"]
