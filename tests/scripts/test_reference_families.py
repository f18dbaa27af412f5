"""The page of families: every class of llama.cpp's converter has a row or a reason."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: transformers builds nothing")

from scripts.reference import families
from scripts.reference.families import Row
from tests.quant import llama_cpp_families


def write_converter(folder: Path, *classes: str) -> Path:
    """Write the table of classes of a converter, and return its folder."""
    (folder / "conversion").mkdir()
    text = "".join(f'    "{name}": "module",\n' for name in classes)
    (folder / "conversion" / "__init__.py").write_text(
        f"TEXT_MODEL_MAP: dict[str, str] = {{\n{text}}}\nMMPROJ_MODEL_MAP: dict[str, str] = {{}}\n"
    )
    return folder


def row(hf: str, nmse: float = 1e-9, mmproj: str = "-") -> Row:
    return Row("family", hf, "native", "llama", nmse, tokenizer="equal", mtp="-", mmproj=mmproj)


def test_a_class_without_a_row_has_a_reason(tmp_path: Path) -> None:
    upstream = write_converter(tmp_path, "LlamaForCausalLM", "AbsentForCausalLM")
    reasons = families.reasons_against([row("LlamaForCausalLM")], upstream)
    assert reasons == llama_cpp_families.NOT_COMPARED | {"AbsentForCausalLM": families.ABSENT}


@pytest.mark.parametrize("compared", [[], ["LlamaForCausalLM", "BitNetForCausalLM"]])
def test_a_class_has_a_row_or_a_reason(tmp_path: Path, compared: list[str]) -> None:
    upstream = write_converter(tmp_path, "LlamaForCausalLM", "BitNetForCausalLM")
    with pytest.raises(LookupError, match=r"BitNet|Llama"):
        families.reasons_against([row(name) for name in compared], upstream)


def test_the_page_counts_rows_and_names_no_folder() -> None:
    failure = "llama-mtmd-cli fails: no '/tmp/families-x1/mmproj.gguf' | <|user|>"
    rows = [row("LlamaForCausalLM", mmproj=failure), row("HYV4ForCausalLM", nmse=0.5)]
    page = families.format_page(rows, {"AForCausalLM": "why", "BForCausalLM": "why"})
    assert "2 classes are compared. 1 of them have an error below 1e-6, 1 of these natively" in page
    assert r"fails: no 'mmproj.gguf' \| <\|user\|>" in page
    assert "knows 2 more classes" in page
    assert "| why | AForCausalLM, BForCausalLM |" in page
