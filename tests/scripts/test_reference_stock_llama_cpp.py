"""scripts/reference/stock_llama_cpp.py: which answers, warnings and exit codes fail a file."""

import sys

import pytest

from scripts.reference import stock_llama_cpp


@pytest.mark.parametrize(
    "line",
    [
        "W done_getting_tensors: model has unused tensor blk.0.attn_v.bias (size = 2048 bytes) -- ignoring",
        "E llama_model_load: error loading model: done_getting_tensors: wrong number of tensors; expected 40, got 39",
        "E llama_model_load: error loading model: missing tensor 'output_norm.weight'",
    ],
)
def test_warnings_about_tensors_are_errors(line):
    with pytest.raises(stock_llama_cpp.Unfit, match=r"^llama-cli warns: [EW] "):
        stock_llama_cpp.check_warnings(f"I loading model\n{line}\nI done", "llama-cli")


def test_other_warnings_are_ignored():
    stock_llama_cpp.check_warnings(
        "I llama_model_loader: - type q4_K: 24 tensors\nW no chat template: using chatml\n",
        "llama-cli",
    )


def test_blank_is_no_answer():
    with pytest.raises(stock_llama_cpp.Unfit, match="llama-server answered nothing"):
        stock_llama_cpp.check_answer(" \n", "llama-server")


def test_exit_code_of_a_tool_fails_the_file(tmp_path, capsys, monkeypatch):
    for tool in ("llama-cli", "llama-server"):
        (tmp_path / tool).write_text("#!/bin/sh\necho cannot load $2 >&2\nexit 3\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setattr(sys, "argv", ["stock_llama_cpp.py", "bad.gguf", "--tools", str(tmp_path)])
    assert stock_llama_cpp.main() == 1
    output = capsys.readouterr().out
    assert "FAILED bad.gguf: llama-cli: exit 3: cannot load bad.gguf" in output
    assert "0 of 1 files load and answer" in output
