"""scripts/reference/stock_llama_cpp.py: what counts as an answer, and what as a warning."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "reference"))
import stock_llama_cpp as prove_stock


@pytest.mark.parametrize(
    "line",
    [
        "W done_getting_tensors: model has unused tensor blk.0.attn_v.bias (size = 2048 bytes) -- ignoring",
        "E llama_model_load: error loading model: done_getting_tensors: wrong number of tensors; expected 40, got 39",
        "E llama_model_load: error loading model: missing tensor 'output_norm.weight'",
    ],
)
def test_words_about_a_tensor_are_told(line):
    with pytest.raises(prove_stock.Unfit, match=r"^llama-cli warns: [EW] "):
        prove_stock.quiet(f"I loading model\n{line}\nI done", "llama-cli")


def test_other_words_are_none_of_ours():
    prove_stock.quiet(
        "I llama_model_loader: - type q4_K: 24 tensors\nW no chat template: using chatml\n",
        "llama-cli",
    )


def test_blank_is_no_answer():
    with pytest.raises(prove_stock.Unfit, match="llama-server answered nothing"):
        prove_stock.answered(" \n", "llama-server")


def test_tool_that_ends_badly_fails_its_file(tmp_path, capsys, monkeypatch):
    for tool in ("llama-cli", "llama-server"):
        (tmp_path / tool).write_text("#!/bin/sh\necho cannot load $2 >&2\nexit 3\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setattr(sys, "argv", ["prove_stock.py", "bad.gguf", "--tools", str(tmp_path)])
    assert prove_stock.main() == 1
    told = capsys.readouterr().out
    assert "FAILED bad.gguf: llama-cli: exit 3: cannot load bad.gguf" in told
    assert "0 of 1 files load and answer" in told
