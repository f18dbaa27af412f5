"""Vocabularies converted to GGUF: token ids of the tokenizers library, end tokens and templates."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import pytest
import tokenizers

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.folder import CheckpointFolder
from quant.convert import checkpoint_source
from quant.errors import UserError
from quant.gguf import header
from quant.model_file import read_header
from quant.quantize import plan, write
from quant.tokenizer import pre_tokenizer, sentencepiece_model, special_tokens, vocabulary
from tests.quant import tiny_checkpoint, vocabularies

ASSETS = Path(__file__).parents[4] / "shared" / "assets" / "tokenizers"
LINES = [
    "Hello world",
    "  two  spaces   three",
    "3 33 333 3333 3.3",
    "I've been 'told he's there, 'RE you sure?",
    "\n\n\t x\r\n",
    "日本語のテキスト 中文",
    "emoji 🚀 👩‍👩‍👧 ✅",
    "Привет, мир! ëêè",
    "def f(x):\n    return x ** 2",
    "don't DON'T",
    "a\u00a0b",
    "",
]


def write_vocabulary(folder: Path, out: Path, size: int) -> Path:
    """Write a GGUF file with only the vocabulary of `folder`, and return `out`."""
    from quant.gguf.layout import encode_entry, lay_out_file

    loaded = vocabulary.load_vocabulary(
        CheckpointFolder(folder), CheckpointConfig({"vocab_size": size}, "config.json")
    )
    entries = [("general.architecture", encode_entry("string", "llama")), *loaded.entries]
    out.write_bytes(lay_out_file(entries, [], 32).header)
    return out


def load(path: Path) -> llama_cpp.Llama:
    return llama_cpp.Llama(str(path), vocab_only=True, verbose=False)


@pytest.mark.parametrize(
    ("name", "size"), [("smollm2", 49152), ("qwen3", 151936), ("mistral7b_v1", 32000)]
)
def test_released_tokenizers_give_the_ids_of_the_tokenizers_library(
    name: str, size: int, tmp_path: Path
) -> None:
    folder = ASSETS / name
    if not folder.is_dir():
        pytest.skip("../shared/assets/tokenizers is not here")
    model = load(write_vocabulary(folder, tmp_path / "v.gguf", size))
    oracle = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for line in LINES:
        ours = model.tokenize(line.encode(), add_bos=False, special=False)
        assert ours == oracle.encode(line, add_special_tokens=False).ids, line
    model.close()


@pytest.mark.parametrize("source", ["tokenizer.model", "tokenizer.json"])
def test_tokenizer_model_and_tokenizer_json_give_the_ids_of_the_library(
    source: str, stories: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(stories, tmp_path / "folder")
    (
        folder / {"tokenizer.model": "tokenizer.json", "tokenizer.json": "tokenizer.model"}[source]
    ).unlink()
    model = load(write_vocabulary(folder, tmp_path / "v.gguf", 512))
    oracle = tokenizers.Tokenizer.from_file(str(stories / "tokenizer.json"))
    for line in [*LINES[:-1], "Once upon a time, there was a little girl named Lily."]:
        assert (
            model.tokenize(line.encode(), add_bos=True, special=False) == oracle.encode(line).ids
        ), line
    model.close()


@pytest.mark.model
def test_smollm2_folder_gives_the_vocabulary_of_the_published_file(
    smollm2: Path, tmp_path: Path
) -> None:
    folder = ASSETS / "smollm2"
    if not folder.is_dir():
        pytest.skip("../shared/assets/tokenizers is not here")
    ours = read_header.read_header(write_vocabulary(folder, tmp_path / "v.gguf", 49152)).metadata
    theirs = read_header.read_header(smollm2).metadata
    for key in ("tokens", "merges", "token_type"):
        our_array, their_array = (table[f"tokenizer.ggml.{key}"] for table in (ours, theirs))
        assert our_array.read_values() == their_array.read_values()
    for key in (
        "model",
        "pre",
        "bos_token_id",
        "eos_token_id",
        "add_bos_token",
        "padding_token_id",
    ):
        assert ours[f"tokenizer.ggml.{key}"] == theirs[f"tokenizer.ggml.{key}"], key
    assert ours["tokenizer.chat_template"] == theirs["tokenizer.chat_template"]


def test_rows_without_a_token_get_padding_tokens(stories: Path, tmp_path: Path) -> None:
    folder = tiny_checkpoint.copy(stories, tmp_path / "padded", vocab_size=520)
    tensors = tiny_checkpoint.read(stories / "model.safetensors")
    padded = np.concatenate([tensors["model.embed_tokens.weight"], np.zeros((8, 64), np.float32)])
    tiny_checkpoint.save(
        folder / "model.safetensors", tensors | {"model.embed_tokens.weight": padded}
    )
    out = tmp_path / "out.gguf"
    write.write_model(
        plan.plan_quantization(checkpoint_source.open_checkpoint(folder), "F32"), out, threads=1
    )
    reader = gguf.GGUFReader(out)
    assert reader.fields["tokenizer.ggml.tokens"].contents()[511:] == [
        read_header.read_header(out).metadata["tokenizer.ggml.tokens"].read_values()[511],
        *(f"[PAD{i}]" for i in range(512, 520)),
    ]
    assert reader.fields["tokenizer.ggml.token_type"].contents()[512:] == [5] * 8
    model = llama_cpp.Llama(str(out), n_ctx=64, n_threads=1, verbose=False)
    assert model("Once upon a time", max_tokens=4, temperature=0)["choices"][0]["text"].startswith(
        ", there"
    )
    model.close()


def metadata_with_tokens(
    folder: Path, tokens: list[str], **files: dict[str, Any]
) -> dict[str, header.MetadataValue]:
    """Return the GGUF metadata of a folder's vocabulary after adding special tokens to it.

    `files` has changes of JSON files in the folder, by name without the extension. Both change the
    folder.
    """
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = [
        {"id": 512 + i, "content": text, "special": True, "normalized": False}
        for i, text in enumerate(tokens)
    ]
    tiny_checkpoint.edit(
        folder / "tokenizer.json", added_tokens=[*tokenizer["added_tokens"], *added]
    )
    for name, changes in files.items():
        tiny_checkpoint.edit(folder / f"{name}.json", **changes)
    return dict(
        read_header.read_header(
            write_vocabulary(folder, folder / "v.gguf", 512 + len(tokens))
        ).metadata
    )


def test_all_end_tokens_of_generation_config_end_generation(stories: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stories, tmp_path / "folder")
    tokens = ["<|eot_id|>", "<|turn_over|>", "<|hand_over|>"]
    metadata = metadata_with_tokens(
        folder, tokens, generation_config={"eos_token_id": [2, 512, 513, 514]}
    )
    assert metadata["tokenizer.ggml.eos_token_id"] == 2
    model = load(folder / "v.gguf")
    table = llama_cpp.llama_model_get_vocab(model.model)
    assert [i for i in range(515) if llama_cpp.llama_vocab_is_eog(table, i)] == [2, 512, 513, 514]
    model.close()


def test_of_more_end_tokens_than_gguf_can_name_the_first_are_kept(
    stories: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(stories, tmp_path / "folder")
    metadata = metadata_with_tokens(
        folder, ["<a>", "<b>", "<c>"], generation_config={"eos_token_id": [2, 512, 513, 514]}
    )
    ids = [metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom")]
    assert ids == [2, 512, 513]


@pytest.mark.parametrize(
    ("config", "file", "expected", "notes"),
    [
        ({"chat_template": "from settings"}, None, "from settings", 0),
        ({"chat_template": "from settings"}, "from the file", "from the file", 1),
        ({"chat_template": "the same"}, "the same", "the same", 0),
        (
            {
                "chat_template": [
                    {"name": "tool", "template": "x"},
                    {"name": "default", "template": "y"},
                ]
            },
            None,
            "y",
            0,
        ),
        ({}, None, None, 0),
    ],
)
def test_chat_template_file_overrides_the_settings(
    config, file, expected, notes, stories, tmp_path
) -> None:
    folder = shutil.copytree(stories, tmp_path / "folder")
    tiny_checkpoint.edit(folder / "tokenizer_config.json", **config)
    if file:
        (folder / "chat_template.jinja").write_text(file)
    loaded = vocabulary.load_vocabulary(
        CheckpointFolder(folder), CheckpointConfig({"vocab_size": 512}, "config.json")
    )
    assert len(loaded.notes) == notes
    assert (
        read_header.read_header(write_vocabulary(folder, tmp_path / "v.gguf", 512)).metadata.get(
            "tokenizer.chat_template"
        )
        == expected
    )


TEMPLATE = {
    "type": "TemplateProcessing",
    "pair": [],
    "special_tokens": {
        "<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]},
        "</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]},
    },
}
BOS, EOS, TEXT = (
    {"SpecialToken": {"id": "<s>", "type_id": 0}},
    {"SpecialToken": {"id": "</s>", "type_id": 0}},
    {"Sequence": {"id": "A", "type_id": 0}},
)


@pytest.mark.parametrize("add_bos", [True, False, None])
@pytest.mark.parametrize("single", [[BOS, TEXT], [BOS, TEXT, EOS], [TEXT, EOS], None])
def test_bos_and_eos_are_added_as_by_transformers(add_bos, single, stories, tmp_path) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: it is the oracle"
    )
    folder = shutil.copytree(stories, tmp_path / "folder")
    post = TEMPLATE | {"single": single} if single else None
    tokenizer = json.loads((folder / "tokenizer.json").read_text()) | {"post_processor": post}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    tiny_checkpoint.edit(
        folder / "tokenizer_config.json",
        add_bos_token=add_bos,
        tokenizer_class="PreTrainedTokenizerFast",
    )
    model = load(write_vocabulary(folder, tmp_path / "v.gguf", 512))
    theirs = transformers.AutoTokenizer.from_pretrained(folder).encode("Once upon")
    table = llama_cpp.llama_model_get_vocab(model.model)
    added = llama_cpp.llama_vocab_get_add_bos(table), llama_cpp.llama_vocab_get_add_eos(table)
    assert added == (theirs[0] == 1, theirs[-1] == 2)
    model.close()
    notes = vocabulary.load_vocabulary(
        CheckpointFolder(folder), CheckpointConfig({"vocab_size": 512}, "config.json")
    ).notes
    assert any("add_bos_token" in note for note in notes) == (
        add_bos is not None and add_bos != added[0]
    )


def test_without_tokenizer_json_the_settings_decide_on_bos(stories: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stories, tmp_path / "folder")
    (folder / "tokenizer.json").unlink()
    for add_bos, expected in ((False, False), (None, True), (True, True)):
        tiny_checkpoint.edit(folder / "tokenizer_config.json", add_bos_token=add_bos)
        metadata = read_header.read_header(
            write_vocabulary(folder, tmp_path / "v.gguf", 512)
        ).metadata
        assert metadata["tokenizer.ggml.add_bos_token"] is expected


def test_named_templates_are_stored_as_by_the_gguf_package(stories: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stories, tmp_path / "folder")
    tiny_checkpoint.edit(
        folder / "tokenizer_config.json",
        chat_template=[
            {"name": "default", "template": "a"},
            {"name": "tool_use", "template": "b"},
            {"name": "r-a g", "template": "c"},
        ],
    )
    ours = read_header.read_header(write_vocabulary(folder, tmp_path / "v.gguf", 512)).metadata
    writer = gguf.GGUFWriter(tmp_path / "theirs.gguf", "llama")
    writer.add_chat_template(
        json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    theirs = read_header.read_header(tmp_path / "theirs.gguf").metadata
    keys = {key for key in (ours | theirs) if "chat_template" in key}
    assert len(keys) == 4
    for key in keys - {"tokenizer.chat_templates"}:
        assert ours[key] == theirs[key]
    assert sorted(ours["tokenizer.chat_templates"].read_values()) == sorted(
        theirs["tokenizer.chat_templates"].read_values()
    )


def test_template_files_override_the_settings(stories: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stories, tmp_path / "folder")
    tiny_checkpoint.edit(folder / "tokenizer_config.json", chat_template="settings")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    metadata = read_header.read_header(write_vocabulary(folder, tmp_path / "v.gguf", 512)).metadata
    assert (metadata["tokenizer.chat_template"], metadata["tokenizer.chat_template.tool_use"]) == (
        "settings",
        "tools",
    )
    (folder / "chat_template.jinja").write_text("file")
    metadata = read_header.read_header(write_vocabulary(folder, tmp_path / "v.gguf", 512)).metadata
    assert (metadata["tokenizer.chat_template"], metadata["tokenizer.chat_template.tool_use"]) == (
        "file",
        "tools",
    )


def test_unpaired_surrogate_is_refused(stories: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stories, tmp_path / "folder")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "\\ud800"}')
    with pytest.raises(UserError, match="cannot be read as JSON"):
        vocabulary.load_vocabulary(
            CheckpointFolder(folder), CheckpointConfig({"vocab_size": 512}, "config.json")
        )


def test_tokens_outside_the_vocabulary_size_are_refused(stories: Path) -> None:
    with pytest.raises(UserError, match=r"token 511 .* outside of the vocab_size 500"):
        vocabulary.load_vocabulary(
            CheckpointFolder(stories), CheckpointConfig({"vocab_size": 500}, "config.json")
        )


GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}


def split(regex: str) -> dict[str, Any]:
    return {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"},
            BYTES,
        ],
    }


@pytest.mark.parametrize(
    ("node", "ignore", "expected"),
    [
        (GPT2, False, "gpt-2"),
        (
            {
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": True}, GPT2],
            },
            False,
            "smollm",
        ),
        (split(pre_tokenizer.LLAMA3), True, "llama-bpe"),
        (split(pre_tokenizer.LLAMA3), False, "smaug-bpe"),
        (split(pre_tokenizer.QWEN2), False, "qwen2"),
    ],
)
def test_pre_tokenizer_is_recognized_by_its_structure(
    node: dict[str, Any], ignore: bool, expected: str
) -> None:
    assert (
        pre_tokenizer.find_pre_tokenizer(
            {"model": {"ignore_merges": ignore}, "pre_tokenizer": node}, "x"
        ).name
        == expected
    )


@pytest.mark.parametrize(
    "node", [None, GPT2 | {"add_prefix_space": True}, split("[a-z]+"), {"type": "Whitespace"}, 7]
)
def test_unknown_pre_tokenizer_is_refused(node: Any) -> None:
    with pytest.raises(UserError, match="splits text in an unknown way"):
        pre_tokenizer.find_pre_tokenizer({"model": {}, "pre_tokenizer": node}, "x")


def nested_sequences(kind: str) -> dict[str, Any]:
    """Return a Sequence node nested 2000 levels deep. `kind` is the key of its list of nodes."""
    node: dict[str, Any] = {"type": "Whitespace"}
    for _ in range(2000):
        node = {"type": "Sequence", kind: [node]}
    return node


@pytest.mark.parametrize("key", ["normalizer", "pre_tokenizer", "post_processor"])
def test_deeply_nested_sequences_are_read(key: str, stories: Path, tmp_path: Path) -> None:
    kinds = {
        "normalizer": "normalizers",
        "pre_tokenizer": "pretokenizers",
        "post_processor": "processors",
    }
    tokenizer = {"model": {}, "pre_tokenizer": GPT2} | {key: nested_sequences(kinds[key])}
    if key == "post_processor":
        assert special_tokens.find_surrounding_tokens(tokenizer, {}, is_sentencepiece=False) == (
            False,
            False,
            [],
        )
    else:
        with pytest.raises(UserError, match="splits text in an unknown way"):
            pre_tokenizer.find_pre_tokenizer(tokenizer, "x")


@pytest.mark.parametrize("index", ["9" * 5000, "-1", "٣", "1.5", True, -3, None, [1]])
def test_added_tokens_with_an_invalid_row_are_ignored(
    index: Any, stories: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(stories, tmp_path / "folder")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    invalid_token = {"id": index, "content": "<x>", "special": True}
    tiny_checkpoint.edit(
        folder / "tokenizer.json", added_tokens=[*tokenizer["added_tokens"], invalid_token]
    )
    if isinstance(index, str):
        tiny_checkpoint.edit(
            folder / "tokenizer_config.json", added_tokens_decoder={index: invalid_token}
        )
    tiny_checkpoint.edit(folder / "added_tokens.json", **{"<y>": index})
    metadata = read_header.read_header(write_vocabulary(folder, tmp_path / "v.gguf", 512)).metadata
    assert not {"<x>", "<y>"} & set(metadata["tokenizer.ggml.tokens"].read_values())


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_piece_with_an_infinite_or_nan_score_is_refused(score: float, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(
        vocabularies.build_sentencepiece([("<unk>", 0.0, 2), ("a", score, 1)])
    )
    with pytest.raises(UserError, match="not a valid SentencePiece model"):
        sentencepiece_model.load_sentencepiece(tmp_path / "tokenizer.model")


def test_too_many_pieces_are_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sentencepiece_model, "MAX_PIECES", 1000)
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x00" * 1001)
    with pytest.raises(UserError, match="not a valid SentencePiece model"):
        sentencepiece_model.load_sentencepiece(tmp_path / "tokenizer.model")


def test_too_large_file_is_not_read(stories: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stories, tmp_path / "folder")
    with (folder / "tokenizer.json").open("r+b") as file:
        file.truncate(1 << 30)
    with pytest.raises(UserError, match=r"has 1,073,741,824 bytes"):
        vocabulary.load_vocabulary(
            CheckpointFolder(folder), CheckpointConfig({"vocab_size": 512}, "config.json")
        )


def test_token_similar_to_a_byte_token_is_normal(stories: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stories, tmp_path / "folder")
    (folder / "tokenizer.model").unlink()
    values = json.loads((folder / "tokenizer.json").read_text())
    values["model"]["vocab"]["<0xzz>"] = 512
    tiny_checkpoint.edit(folder / "tokenizer.json", model=values["model"])
    metadata = read_header.read_header(write_vocabulary(folder, tmp_path / "v.gguf", 513)).metadata
    assert metadata["tokenizer.ggml.token_type"].read_values()[512] == sentencepiece_model.NORMAL


def test_a_damaged_sentencepiece_model_is_read_or_refused(stories: Path, tmp_path: Path) -> None:
    import random

    data, rng, file = (
        (stories / "tokenizer.model").read_bytes(),
        random.Random(0),
        tmp_path / "tokenizer.model",
    )
    refused = 0
    for _ in range(300):
        broken = (
            bytearray(data[: rng.randrange(1, len(data))])
            if rng.random() < 0.3
            else bytearray(data)
        )
        broken[rng.randrange(len(broken))] = rng.randrange(256)
        file.write_bytes(broken)
        try:
            sentencepiece_model.load_sentencepiece(file)
        except UserError:
            refused += 1
    assert refused > 100


def test_unsupported_model_type_is_refused_by_name(stories: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stories, tmp_path / "folder")
    (folder / "tokenizer.model").unlink()
    tiny_checkpoint.edit(folder / "tokenizer.json", model={"type": "WordLevel", "vocab": []})
    with pytest.raises(UserError, match="is of type WordLevel: "):
        vocabulary.load_vocabulary(
            CheckpointFolder(folder), CheckpointConfig({"vocab_size": 512}, "config.json")
        )
