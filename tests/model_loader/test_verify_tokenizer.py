"""quantize and convert verify the tokenizer first, and warn about a template without an end token."""

import json
import shutil
from pathlib import Path

import pytest

from tests.quant import tiny_checkpoint

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}[end]{% endif %}{% endfor %}"


@pytest.fixture
def folder(stories: Path, tmp_path: Path) -> Path:
    return shutil.copytree(stories, tmp_path / "Stories")


@pytest.mark.parametrize("command", [["quantize", "-t", "F32"], ["convert", "--outtype", "f32"]])
def test_a_tokenizer_that_llama_cpp_runs_otherwise_is_refused_and_nothing_is_written(
    llmcli, folder, command
) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["merges"].reverse()
    tiny_checkpoint.edit(folder / "tokenizer.json", model=tokenizer["model"])
    before = sorted(folder.parent.iterdir())
    done = llmcli(*command, str(folder))
    assert done.code == 1
    assert "test strings differently" in done.err
    assert done.err.count("llama.cpp: ") == 10
    assert sorted(folder.parent.iterdir()) == before


@pytest.mark.parametrize("command", ["quantize", "convert"])
def test_a_pre_tokenizer_for_pieces_is_refused(llmcli, folder, command) -> None:
    done = llmcli(command, str(folder), "--pre", "gpt-2")
    assert done.code == 1
    assert "it has no pre-tokenizer" in done.err
    assert "leave --pre out" in done.err


def test_a_pre_tokenizer_for_a_gguf_is_refused(llmcli, stories_gguf: Path) -> None:
    done = llmcli("quantize", str(stories_gguf), "--pre", "gpt-2")
    assert done.code == 2
    assert "--pre applies to checkpoint folders" in done.err


@pytest.mark.parametrize(
    ("template", "warned"), [(TURNS, True), (TURNS.replace("[end]", "</s>"), False)]
)
def test_a_template_whose_turns_do_not_end_is_warned_of(
    llmcli, folder, template: str, warned: bool
) -> None:
    tiny_checkpoint.edit(folder / "tokenizer_config.json", chat_template=template)
    done = llmcli("quantize", str(folder), "-t", "F32", "--dry-run")
    assert done.code == 0
    assert ("generation would not stop" in done.err) == warned
