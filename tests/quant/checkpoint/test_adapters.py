"""Folders that have only a LoRA adapter are recognized, whatever their settings contain."""

from pathlib import Path

import pytest

from quant.checkpoint.adapters import ADAPTER_CONFIG, adapter_error


@pytest.mark.parametrize(
    ("text", "base"),
    [
        ('{"peft_type": "LORA", "base_model_name_or_path": "org/base"}', "org/base"),
        ('{"base_model_name_or_path": null}', "another model"),
        ('{"base_model_name_or_path": ""}', "another model"),
        ("[]", "another model"),
        ("[" * 5000, "another model"),
        ("\ufeff{", "another model"),
    ],
)
def test_adapter_is_recognized(text: str, base: str, tmp_path: Path) -> None:
    (tmp_path / ADAPTER_CONFIG).write_text(text, encoding="utf-8")
    error = adapter_error(tmp_path)
    assert str(error) == f"{tmp_path} is a LoRA adapter of {base}, not a complete model"
    assert error
    assert "merge_and_unload()" in error.hint


def test_model_is_no_adapter(tmp_path: Path) -> None:
    assert adapter_error(tmp_path) is None
    (tmp_path / ADAPTER_CONFIG).write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    assert adapter_error(tmp_path) is None
