"""scripts/quality/mixes.py: mixes of types that fill a size."""

from pathlib import Path

import pytest

from quant.native import ggml
from quant.quantize.write import open_gguf
from scripts.quality import mixes
from tests.quant.upstream import random_sums, thin_model, write_gguf


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A model of 17 blocks and its importance matrix."""
    model = thin_model(tmp_path / "model.gguf", 17, tied=True)
    return model, write_gguf(tmp_path / "imatrix.gguf", random_sums(model))


def tensor_bytes(model: Path, imatrix: Path, mix: mixes.TypeMix) -> int:
    steps = mixes.file_plan(model, mix.file_type, imatrix).steps
    return sum(
        step.weight.rows
        * ggml.row_bytes(mix.types.get(step.weight.name, step.type), step.weight.columns)
        for step in steps
    )


@pytest.mark.parametrize("file_type", ["Q2_K", "Q3_K_M", "Q4_K_M"])
def test_mixes_fill_the_bytes_of_a_file_type(file_type: str, files: tuple[Path, Path]) -> None:
    model, imatrix = files
    size = mixes.file_plan(model, file_type, imatrix).bytes_after
    largest = max(
        weight.rows * ggml.row_bytes("Q8_0", weight.columns) for weight in open_gguf(model).weights
    )
    iq, hand_made = (
        mixes.iq_mix(model, imatrix, size),
        mixes.hand_made_mix(model, imatrix, file_type, size),
    )
    assert iq.file_type.startswith("IQ") and not hand_made.file_type.startswith("IQ")
    for mix in (iq, hand_made):
        assert size - largest < mix.nbytes <= size
        assert mix.nbytes == tensor_bytes(model, imatrix, mix)
        steps = mixes.file_plan(model, mix.file_type, imatrix).steps
        assert mix.types.keys() == {step.weight.name for step in steps if step.method}
        assert len(mix.flags) == 2 * len(mix.types)


def test_bytes_are_spent_on_values_and_on_the_blocks_at_the_ends_first(
    files: tuple[Path, Path],
) -> None:
    names = [weight.name for weight in open_gguf(files[0]).weights if "norm" not in weight.name]
    order = [*mixes.spending_order(names)]
    firsts = order[: sum("attn_v" in name or "attn_output" in name for name in names)]
    blocks = [name for name in order if "ffn_down" in name]
    assert set(order) == {name for name in names if name.startswith("blk.")}
    assert all("attn_v" in name or "attn_output" in name for name in firsts)
    assert [int(name.split(".")[1]) for name in blocks[:6]] == [0, 1, 2, 14, 15, 16]
