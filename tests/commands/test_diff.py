"""`llmcli diff`, and the roles and tensors that `llmcli show` lists."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from quant.quantize import plan, write
from tests.fixtures.cli import Done

Llmcli = Callable[..., Done]


@pytest.fixture
def q8_0_file(stories_gguf: Path, tmp_path: Path) -> Path:
    """The stories model in Q8_0."""
    out = tmp_path / "small.gguf"
    write.write_model(plan.plan_quantization(write.open_gguf(stories_gguf), "Q8_0"), out, threads=1)
    return out


def test_diff_lists_only_differences_unless_all_is_given(
    llmcli: Llmcli, stories_gguf: Path, q8_0_file: Path
) -> None:
    done = llmcli("diff", str(stories_gguf), str(q8_0_file))
    assert done.code == 0
    assert "F32 -> Q8_0" in done.out
    assert "general.file_type" in done.out
    assert "attn_norm" not in done.out
    assert "attn_norm" in llmcli("diff", str(stories_gguf), str(q8_0_file), "--all").out
    assert llmcli("diff", str(q8_0_file), str(q8_0_file)).out.startswith("0 keys differ")


def test_diff_json_is_one_document(llmcli: Llmcli, stories_gguf: Path, q8_0_file: Path) -> None:
    document = json.loads(llmcli("diff", str(stories_gguf), str(q8_0_file), "--json").out)
    assert (document["a"]["file_type"], document["b"]["file_type"], document["same"]) == (
        "F32",
        "Q8_0",
        False,
    )
    row = next(row for row in document["tensors"] if row["name"] == "blk.0.attn_q.weight")
    assert row["types"] == ["F32", "Q8_0"]
    assert 0 < row["relative_rmse"] < 0.01
    assert json.loads(llmcli("diff", str(q8_0_file), str(q8_0_file), "--json").out)["same"] is True


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2:135m", "smollm2:135m is not on this disk"),
        ("smolm2:135m", "error: "),
        ("./none.gguf", "none.gguf"),
    ],
)
def test_diff_of_a_model_that_is_not_on_disk_is_an_error(
    llmcli: Llmcli, stories_gguf: Path, name: str, message: str
) -> None:
    done = llmcli("diff", str(stories_gguf), name)
    assert done.code == 1
    assert message in done.err
    assert "hint: " in done.err


def test_diff_of_a_checkpoint_folder_is_an_error(
    llmcli: Llmcli, stories_gguf: Path, stories: Path
) -> None:
    done = llmcli("diff", str(stories_gguf), str(stories))
    assert done.code == 1
    assert "is a checkpoint folder" in done.err


def test_show_lists_the_bytes_of_every_role(llmcli: Llmcli, q8_0_file: Path) -> None:
    roles = json.loads(llmcli("show", str(q8_0_file), "--json").out)["roles"]
    assert roles["attn_q"]["tensors"] == 5
    assert roles["attn_q"]["types"] == {"Q8_0": 5}
    tensors = gguf.GGUFReader(q8_0_file).tensors
    assert sum(role["bytes"] for role in roles.values()) == sum(
        int(tensor.n_bytes) for tensor in tensors
    )
    assert sum(role["parameters"] for role in roles.values()) == sum(
        int(tensor.n_elements) for tensor in tensors
    )
    assert "token_embd" in llmcli("show", str(q8_0_file)).out


def test_show_tensors_lists_every_tensor_of_the_file(llmcli: Llmcli, q8_0_file: Path) -> None:
    listed = json.loads(llmcli("show", str(q8_0_file), "--tensors", "--json").out)["tensors"]
    expected = gguf.GGUFReader(q8_0_file).tensors
    assert [(row["name"], row["shape"], row["type"], row["bytes"]) for row in listed] == [
        (
            tensor.name,
            [int(length) for length in tensor.shape],
            tensor.tensor_type.name,
            int(tensor.n_bytes),
        )
        for tensor in expected
    ]
    assert "blk.4.ffn_down.weight" in llmcli("show", str(q8_0_file), "--tensors").out
    assert "blk.4.ffn_down.weight" not in llmcli("show", str(q8_0_file)).out
