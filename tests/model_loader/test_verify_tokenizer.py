"""`quantize` and `convert` check the tokenizer before they write, and warn about a chat template
that ends messages without an end token.
"""

import json
import re
import shutil
from pathlib import Path

import gguf
import llama_cpp
import pytest
import tokenizers

from tests.quant import tiny_checkpoint

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.role == 'assistant' %}[end]{% endif %}{% endfor %}"
)


@pytest.fixture
def folder(stories: Path, tmp_path: Path) -> Path:
    """Return a copy of the checkpoint `stories`."""
    return shutil.copytree(stories, tmp_path / "Stories")


@pytest.mark.parametrize("command", [["quantize", "-t", "F32"], ["convert", "--outtype", "f32"]])
def test_tokenizer_that_llama_cpp_runs_differently_is_refused_and_nothing_is_written(
    llmcli, folder, command
) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["merges"].reverse()
    tiny_checkpoint.edit(folder / "tokenizer.json", model=tokenizer["model"])
    before = sorted(folder.parent.iterdir())
    done = llmcli(*command, str(folder))
    assert done.code == 1
    assert "would encode text differently" in done.err
    assert re.search(r"test strings that differ: \d+\), such as '.+' as '.+' instead of", done.err)
    assert sorted(folder.parent.iterdir()) == before


@pytest.mark.parametrize("command", ["quantize", "convert"])
def test_pre_tokenizer_is_refused_for_a_sentencepiece_tokenizer(llmcli, folder, command) -> None:
    done = llmcli(command, str(folder), "--pre", "gpt-2")
    assert done.code == 1
    assert "it has no pre-tokenizer" in done.err
    assert "leave --pre out" in done.err


def test_pre_tokenizer_is_refused_for_a_gguf(llmcli, stories_gguf: Path) -> None:
    done = llmcli("quantize", str(stories_gguf), "--pre", "gpt-2")
    assert done.code == 2
    assert "--pre applies to checkpoint folders" in done.err


@pytest.mark.parametrize(
    ("template", "warned"), [(TEMPLATE, True), (TEMPLATE.replace("[end]", "</s>"), False)]
)
def test_warning_if_the_template_ends_messages_without_an_end_token(
    llmcli, folder, template: str, warned: bool
) -> None:
    tiny_checkpoint.edit(folder / "tokenizer_config.json", chat_template=template)
    done = llmcli("quantize", str(folder), "-t", "F32", "--dry-run")
    assert done.code == 0
    assert ("generation would not stop" in done.err) == warned


def test_accepted_differences_are_recorded_in_the_file_and_told(llmcli, folder) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["merges"].reverse()
    tiny_checkpoint.edit(folder / "tokenizer.json", model=tokenizer["model"])
    out = folder.parent / "out.gguf"
    done = llmcli(
        *("quantize", "-t", "F32", str(folder), "-o", str(out)), "--accept-tokenizer-differences"
    )
    assert done.code == 0
    assert "llama.cpp encodes text differently from the model's tokenizer" in done.err
    stored = gguf.GGUFReader(out).fields["llmcli.tokenizer.differing_strings"].contents()
    assert 1 <= len(stored) <= 20
    reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary = llama_cpp.Llama(str(out), vocab_only=True, verbose=False)
    different = [
        text
        for text in stored
        if reference.encode(text, add_special_tokens=False).ids
        != vocabulary.tokenize(text.encode(), add_bos=False, special=True)
    ]
    assert different == stored


def test_the_option_is_refused_for_a_gguf(llmcli, stories_gguf: Path) -> None:
    done = llmcli("quantize", str(stories_gguf), "--accept-tokenizer-differences")
    assert done.code == 2
    assert "--accept-tokenizer-differences applies to checkpoint folders" in done.err
