"""`llmcli diff` and the tensors in `show`, on the command line."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from quant.quantize import plan, write
from tests.fixtures.cli import Done

Llmcli = Callable[..., Done]


@pytest.fixture
def small(stories_gguf: Path, tmp_path: Path) -> Path:
    out = tmp_path / "small.gguf"
    write.write_model(plan.plan_quantization(write.open_gguf(stories_gguf), "Q8_0"), out, threads=1)
    return out


def test_diff_lists_what_differs_and_only_that(
    llmcli: Llmcli, stories_gguf: Path, small: Path
) -> None:
    done = llmcli("diff", str(stories_gguf), str(small))
    assert done.code == 0
    assert "F32 -> Q8_0" in done.out
    assert "general.file_type" in done.out
    assert "attn_norm" not in done.out
    assert "attn_norm" in llmcli("diff", str(stories_gguf), str(small), "--all").out
    assert llmcli("diff", str(small), str(small)).out.startswith("0 keys differ")


def test_diff_json_is_one_document(llmcli: Llmcli, stories_gguf: Path, small: Path) -> None:
    document = json.loads(llmcli("diff", str(stories_gguf), str(small), "--json").out)
    assert (document["a"]["file_type"], document["b"]["file_type"], document["same"]) == (
        "F32",
        "Q8_0",
        False,
    )
    row = next(row for row in document["tensors"] if row["name"] == "blk.0.attn_q.weight")
    assert row["types"] == ["F32", "Q8_0"]
    assert 0 < row["relative_rmse"] < 0.01
    assert json.loads(llmcli("diff", str(small), str(small), "--json").out)["same"] is True


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smollm2:135m", "smollm2:135m is not on this disk"),
        ("smolm2:135m", "error: "),
        ("./none.gguf", "none.gguf"),
    ],
)
def test_what_is_not_here_cannot_be_compared(
    llmcli: Llmcli, stories_gguf: Path, name: str, said: str
) -> None:
    done = llmcli("diff", str(stories_gguf), name)
    assert done.code == 1
    assert said in done.err
    assert "hint: " in done.err


def test_diff_of_a_folder_says_what_to_do(
    llmcli: Llmcli, stories_gguf: Path, stories: Path
) -> None:
    done = llmcli("diff", str(stories_gguf), str(stories))
    assert done.code == 1
    assert "is a checkpoint folder" in done.err


def test_show_tells_where_the_bytes_are(llmcli: Llmcli, small: Path) -> None:
    roles = json.loads(llmcli("show", str(small), "--json").out)["roles"]
    assert roles["attn_q"]["tensors"] == 5
    assert roles["attn_q"]["types"] == {"Q8_0": 5}
    tensors = gguf.GGUFReader(small).tensors
    assert sum(role["bytes"] for role in roles.values()) == sum(
        int(tensor.n_bytes) for tensor in tensors
    )
    assert sum(role["parameters"] for role in roles.values()) == sum(
        int(tensor.n_elements) for tensor in tensors
    )
    assert "token_embd" in llmcli("show", str(small)).out


def test_show_tensors_lists_every_tensor_of_the_file(llmcli: Llmcli, small: Path) -> None:
    listed = json.loads(llmcli("show", str(small), "--tensors", "--json").out)["tensors"]
    theirs = gguf.GGUFReader(small).tensors
    assert [(row["name"], row["shape"], row["type"], row["bytes"]) for row in listed] == [
        (t.name, [int(side) for side in t.shape], t.tensor_type.name, int(t.n_bytes))
        for t in theirs
    ]
    assert "blk.4.ffn_down.weight" in llmcli("show", str(small), "--tensors").out
    assert "blk.4.ffn_down.weight" not in llmcli("show", str(small)).out
