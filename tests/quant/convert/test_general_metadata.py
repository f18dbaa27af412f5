"""The general.* keys of a converted file, in llama.cpp's names and order, from a model card that
may be invalid.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest

from quant.checkpoint import model_card
from quant.convert import checkpoint_source, general_metadata
from quant.model_file import read_header
from quant.quantize import plan, write
from tests.quant import tiny_checkpoint

CARD = """---
license: apache-2.0
language:
- en
- no
tags: [tiny, stories]
pipeline_tag: text-generation
base_model: org/Story-Base-1B
datasets:
- org/tales
model_name: Stories
---
# Stories
"""


@pytest.fixture
def folder(stories: Path, tmp_path: Path) -> Path:
    return shutil.copytree(stories, tmp_path / "stories-260K-chat")


def convert(folder: Path, out: Path, kind: str = "F32") -> dict[str, Any]:
    """Convert `folder` to the file `out`, and return its metadata as the gguf package reads it."""
    write.write_model(
        plan.plan_quantization(checkpoint_source.open_checkpoint(folder), kind), out, threads=1
    )
    return {key: field.contents() for key, field in gguf.GGUFReader(out).fields.items()}


def test_general_keys_from_the_card_the_name_and_the_size(folder: Path, tmp_path: Path) -> None:
    (folder / "README.md").write_text(CARD)
    metadata = convert(folder, tmp_path / "x.gguf")
    expected = {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": "Stories",
        "general.basename": "stories",
        "general.finetune": "chat",
        "general.size_label": "260K",
        "general.license": "apache-2.0",
        "general.base_model.count": 1,
        "general.base_model.0.name": "Story Base 1B",
        "general.base_model.0.organization": "Org",
        "general.base_model.0.repo_url": "https://huggingface.co/org/Story-Base-1B",
        "general.dataset.count": 1,
        "general.dataset.0.name": "Tales",
        "general.tags": ["tiny", "stories", "text-generation"],
        "general.languages": ["en", "no"],
    }
    assert {key: metadata.get(key) for key in expected} == expected
    assert "llmcli.convert.source_method" not in metadata


def test_general_keys_equal_those_of_the_gguf_package(folder: Path, tmp_path: Path) -> None:
    (folder / "README.md").write_text(CARD)
    tiny_checkpoint.edit(folder / "generation_config.json", top_k=20, top_p=0.95, temperature=0.6)
    writer = gguf.GGUFWriter(None, "llama")
    gguf.Metadata.load(None, folder, None, 260_000).set_gguf_meta_model(writer)
    theirs = {key: value.value for key, value in writer.kv_data[0].items()}
    ours = convert(folder, tmp_path / "x.gguf")
    for key, value in theirs.items():
        assert ours[key] == (pytest.approx(value) if isinstance(value, float) else value), key
    order = [key for key in ours if key in theirs]
    assert order == list(theirs)


def test_keys_are_in_the_order_of_llama_cpp(folder: Path, tmp_path: Path) -> None:
    keys = list(convert(folder, tmp_path / "x.gguf", "Q8_0"))
    positions = [
        keys.index(key)
        for key in (
            "general.architecture",
            "general.type",
            "general.name",
            "llama.block_count",
            "general.file_type",
            "general.quantization_version",
            "tokenizer.ggml.model",
        )
    ]
    assert positions == sorted(positions)
    assert read_header.read_header(tmp_path / "x.gguf").file_type == "Q8_0"


def test_size_label_is_counted_if_the_name_has_none(stories: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stories, tmp_path / "mine")
    metadata = convert(folder, tmp_path / "x.gguf")
    assert (metadata["general.name"], metadata["general.size_label"]) == ("Mine", "260K")
    assert "general.basename" not in metadata


def test_repository_and_commit_are_read_from_the_hub_cache_path(
    stories: Path, tmp_path: Path
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = tmp_path / "models--org--Small-260K-Instruct" / "snapshots" / commit
    shutil.copytree(stories, folder)
    assert general_metadata.find_origin(folder) == general_metadata.CheckpointOrigin(
        "Small-260K-Instruct", "org/Small-260K-Instruct", commit
    )
    assert general_metadata.find_origin(tmp_path / "mine") == general_metadata.CheckpointOrigin(
        "mine"
    )
    metadata = convert(folder, tmp_path / "x.gguf")
    expected = {
        "general.name": "Small 260K Instruct",
        "general.organization": "Org",
        "general.finetune": "Instruct",
        "general.source.repo_url": "https://huggingface.co/org/Small-260K-Instruct",
        "llmcli.convert.revision": commit,
    }
    assert {key: metadata.get(key) for key in expected} == expected


def test_invalid_sampling_settings_are_ignored(folder: Path, tmp_path: Path) -> None:
    tiny_checkpoint.edit(
        folder / "generation_config.json",
        top_k=20,
        top_p="x",
        min_p=-1,
        temperature=0.6,
        mirostat=True,
        penalty_last_n=2**40,
        xtc_threshold=[1],
    )
    metadata = convert(folder, tmp_path / "x.gguf")
    sampling = {
        key: value for key, value in metadata.items() if key.startswith("general.sampling.")
    }
    assert sampling == {"general.sampling.top_k": 20, "general.sampling.temp": pytest.approx(0.6)}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# no head\n",
        "---\nlicense: mit\n",
        "---\n- a\n- b\n---\n",
        "---\nlicense: [\n---\n",
        "---\na: &a [x, x]\nb: [*a, *a]\nlicense: mit\n---\n",
        "---\n" + "[" * 5000 + "\n---\n",
        "---\na: " + "[" * 100_000 + "]" * 100_000 + "\nlicense: mit\n---\n",
        "---\n" + "- " * 100_000 + "x\n---\n",
        "---\nlicense: mit\na: " + "{a: " * 40_000 + "}" * 40_000 + "\n---\n",
        "---\nlicense: " + "x" * 5000 + "\n---\n",
        "---\nlicense: ~\nname: null\n---\n",
        "---\nlicense: mit\n" + "x: y\n" * 100_000 + "---\n",
        '---\nlicense: "\\ud800"\n---\n',
        "---\n!!python/object/apply:os.system ['false']\n---\n",
        "---\nlicense: {a: b}\nname: [x]\nversion: 1\n---\n",
    ],
)
def test_invalid_card_is_ignored(text: str, folder: Path, tmp_path: Path) -> None:
    (folder / "README.md").write_text(text)
    assert "license" not in model_card.load_card(folder)
    metadata = convert(folder, tmp_path / "x.gguf")
    assert "general.license" not in metadata
    assert metadata["general.name"]


def test_card_that_is_not_text_is_ignored(folder: Path) -> None:
    (folder / "README.md").write_bytes(b"---\n\xff\xfe\x00license: mit\n---\n")
    model_card.load_card(folder)
    (folder / "README.md").unlink()
    (folder / "README.md").mkdir()
    assert model_card.load_card(folder) == {}


@pytest.mark.parametrize(
    ("head", "config", "parent"),
    [
        ("base_model: org/a", {"_name_or_path": "org/b"}, "org/a"),
        ("base_model: [org/a, org/c]", {}, "org/a"),
        ("base_model: /home/me/a", {"_name_or_path": "org/b"}, "org/b"),
        ("license: mit", {"_name_or_path": "./b"}, None),
        ("license: mit", {"_name_or_path": 3}, None),
    ],
)
def test_parent_is_a_repository_name_or_none(
    head: str, config: dict[str, Any], parent: str | None, tmp_path: Path
) -> None:
    (tmp_path / "README.md").write_text(f"---\n{head}\n---\n")
    assert model_card.find_parent(tmp_path, json.loads(json.dumps(config))) == parent
