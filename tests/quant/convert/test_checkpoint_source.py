"""Converted Llama checkpoints have the logits of transformers, and invalid folders are refused."""

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from quant.convert import checkpoint_source
from quant.convert.parts import rope
from quant.errors import UserError
from quant.model_file import load_checks, read_header
from quant.quantize import plan, write
from tests.quant import tiny_checkpoint

TEXT = list(np.random.default_rng(3).integers(3, 500, 320))


@pytest.fixture
def convert(tmp_path: Path) -> Callable[[Path, str], Path]:
    """Return a function that converts a checkpoint folder to a GGUF file in the test's folder."""

    def make(folder: Path, kind: str = "F32") -> Path:
        out = tmp_path / f"{folder.name}-{kind}.gguf"
        write.write_model(
            plan.plan_quantization(checkpoint_source.open_checkpoint(folder), kind), out, threads=1
        )
        load_checks.check_loadable(read_header.read_header(out))
        return out

    return make


def llama(path: Path, **settings: Any) -> llama_cpp.Llama:
    return llama_cpp.Llama(
        str(path), n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False, **settings
    )


def logits(path: Path, tokens: list[int]) -> np.ndarray:
    """Return llama.cpp's logits at every position, of shape [tokens, vocabulary]."""
    model = llama(path, logits_all=True)
    model.eval([int(token) for token in tokens])
    scores = np.array(model.scores[: len(tokens)])
    model.close()
    return scores


def transformers_logits(folder: Path, tokens: list[int]) -> np.ndarray:
    """Return the float32 logits of transformers, of shape [tokens, vocabulary]."""
    torch = pytest.importorskip("torch", reason="torch is not installed: logits have no oracle")
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: logits have no oracle"
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.tensor([[int(token) for token in tokens]])).logits[0].numpy()


def nmse(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(((ours - theirs) ** 2).sum() / (theirs**2).sum())


def assert_same_argmax(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Assert that the most probable token is equal wherever its lead exceeds rounding errors."""
    best = np.sort(theirs, axis=-1)[:, -2:]
    clear = best[:, 1] - best[:, 0] > 1e-3
    assert clear.mean() > 0.95
    assert (ours.argmax(-1) == theirs.argmax(-1))[clear].all()


def random_llama(
    folder: Path, stories: Path, shards: int = 1, dtype: str = "F32", **changes: Any
) -> Path:
    """Write a Llama checkpoint with random weights, and return `folder`.

    The weights are scaled so that a wrong row, norm or bias changes the logits. `changes` replace
    settings of the config.
    """
    config = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": False,
        "attention_bias": True,
    }
    shutil.copytree(stories, folder)
    (folder / "model.safetensors").unlink()
    tiny_checkpoint.edit(folder / "config.json", **{**config, **changes})
    values = json.loads((folder / "config.json").read_text())
    random = np.random.default_rng(0)
    tensors = {
        name: random.normal(1.0, 0.2, shape) if "norm" in name else random.normal(0, 0.12, shape)
        for name, shape in shapes(values).items()
    }
    names = list(tensors)
    files = (
        ["model.safetensors"]
        if shards == 1
        else [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    )
    for i, file in enumerate(files):
        tiny_checkpoint.save(
            folder / file, {name: tensors[name] for name in names[i::shards]}, dtype
        )
    if shards > 1:
        weight_map = {name: files[names.index(name) % shards] for name in names}
        tiny_checkpoint.edit(folder / "model.safetensors.index.json", weight_map=weight_map)
    return folder


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, ff, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query_rows, key_rows = (
        config["num_attention_heads"] * size,
        config["num_key_value_heads"] * size,
    )
    result: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (512, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        result["lm_head.weight"] = (512, hidden)
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}"
        result |= {
            f"{prefix}.self_attn.{role}_proj.weight": (rows, hidden)
            for role, rows in zip("qkv", (query_rows, key_rows, key_rows), strict=True)
        }
        if config["attention_bias"]:
            result |= {
                f"{prefix}.self_attn.{role}_proj.bias": (rows,)
                for role, rows in zip("qkv", (query_rows, key_rows, key_rows), strict=True)
            }
            result[f"{prefix}.self_attn.o_proj.bias"] = (hidden,)
        result |= {
            f"{prefix}.self_attn.o_proj.weight": (hidden, query_rows),
            f"{prefix}.mlp.gate_proj.weight": (ff, hidden),
            f"{prefix}.mlp.up_proj.weight": (ff, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, ff),
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
        }
    return result


def test_logits_of_a_trained_model_equal_transformers(stories: Path, convert) -> None:
    theirs, ours = transformers_logits(stories, TEXT), logits(convert(stories), TEXT)
    assert nmse(ours, theirs) < 1e-6
    assert_same_argmax(ours, theirs)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"num_key_value_heads": 4, "attention_bias": False, "tie_word_embeddings": True},
        {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "attention_bias": False,
            "sliding_window": None,
        },
    ],
    ids=["biases, few heads", "llama3 rope", "linear rope", "tied", "mistral"],
)
def test_logits_of_random_models_equal_transformers(
    changes: dict[str, Any], stories: Path, convert, tmp_path: Path
) -> None:
    folder = random_llama(tmp_path / "random", stories, **changes)
    theirs, ours = transformers_logits(folder, TEXT), logits(convert(folder), TEXT)
    assert nmse(ours, theirs) < 1e-6
    assert_same_argmax(ours, theirs)


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K_M"])
def test_converted_model_generates_the_trained_text(kind: str, stories: Path, convert) -> None:
    model = llama(convert(stories, kind))
    answer = model("Once upon a time", max_tokens=32, temperature=0)["choices"][0]["text"]
    model.close()
    assert answer.startswith(
        ", there was a little girl named Lily. She loved to play outside in the park"
    )


def test_shards_give_the_same_tensors_as_one_file(stories: Path, tmp_path: Path, convert) -> None:
    single = convert(random_llama(tmp_path / "one", stories))
    sharded = convert(random_llama(tmp_path / "many", stories, shards=3))
    from tests.quant.upstream import tensor_contents

    assert tensor_contents(single) == tensor_contents(sharded)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_floats_are_unchanged_and_norms_become_f32(
    dtype: str, stories: Path, tmp_path: Path, convert
) -> None:
    header = read_header.read_header(
        convert(random_llama(tmp_path / "half", stories, dtype=dtype), dtype)
    )
    types = {tensor.name: tensor.type for tensor in header.tensors}
    assert types["blk.0.attn_q.weight"] == dtype
    assert {
        types["blk.0.attn_norm.weight"],
        types["blk.0.attn_q.bias"],
        types["output_norm.weight"],
    } == {"F32"}


def test_both_spellings_of_rotary_settings_give_the_same_file(
    stories: Path, tmp_path: Path, convert
) -> None:
    old = random_llama(tmp_path / "a" / "m", stories, rope_theta=500000.0, rope_scaling=LLAMA3)
    new = random_llama(
        tmp_path / "b" / "m",
        stories,
        rope_theta=None,
        rope_parameters={**LLAMA3, "rope_theta": 500000.0},
    )
    first = convert(old).read_bytes()
    assert convert(new).read_bytes() == first


def test_direct_quantization_equals_that_of_a_float_file(
    stories: Path, tmp_path: Path, convert
) -> None:
    from tests.quant.upstream import tensor_contents

    folder = random_llama(
        tmp_path / "wide", stories, hidden_size=256, intermediate_size=512, head_dim=64
    )
    through = tmp_path / "through.gguf"
    write.write_model(
        plan.plan_quantization(write.open_gguf(convert(folder)), "Q4_K_M"), through, threads=1
    )
    assert tensor_contents(convert(folder, "Q4_K_M")) == tensor_contents(through)
    assert "Q4_K" in read_header.read_header(through).type_totals


def test_rope_row_order_interleaves_the_halves_of_each_head() -> None:
    assert rope.rope_row_order(2, 6) == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_copy_of_a_tied_embedding_is_left_out(stories: Path, tmp_path: Path, convert) -> None:
    folder = tiny_checkpoint.copy(stories, tmp_path / "copy")
    tensors = tiny_checkpoint.read(stories / "model.safetensors")
    tiny_checkpoint.save(
        folder / "model.safetensors",
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]},
    )
    assert "output.weight" not in {
        tensor.name for tensor in read_header.read_header(convert(folder)).tensors
    }
    tiny_checkpoint.save(
        folder / "model.safetensors",
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * 2},
    )
    with pytest.raises(
        UserError, match=r"ties the head to the embedding, but lm_head\.weight is different"
    ):
        checkpoint_source.open_checkpoint(folder)


def test_one_error_names_all_mismatches(stories: Path, tmp_path: Path) -> None:
    folder = tiny_checkpoint.copy(stories, tmp_path / "odd")
    tensors = tiny_checkpoint.read(stories / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_norm.scale"] = np.zeros(8, np.float32)
    tensors["model.norm.weight"] = np.ones(63, np.float32)
    tiny_checkpoint.save(folder / "model.safetensors", tensors)
    with pytest.raises(UserError) as caught:
        checkpoint_source.open_checkpoint(folder)
    for message in (
        "3 tensors",
        "q_norm.scale is unknown",
        "blk.1.ffn_up.weight is missing",
        "model.norm.weight is [63], not [64]",
    ):
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("first", "inner"),
    [
        ("_orig_mod.", ""),
        ("module.", ""),
        ("module._orig_mod.", ""),
        ("", "_orig_mod."),
        ("_fsdp_wrapped_module.", "_fsdp_wrapped_module._checkpoint_wrapped_module."),
    ],
)
def test_words_of_wrappers_in_the_names_are_left_out(
    first: str, inner: str, stories: Path, tmp_path: Path, convert
) -> None:
    folder = tiny_checkpoint.copy(stories, tmp_path / "wrapped")
    tensors = {
        first + name.replace("model.layers.1.", f"model.layers.1.{inner}"): values
        for name, values in tiny_checkpoint.read(stories / "model.safetensors").items()
    }
    tiny_checkpoint.save(folder / "model.safetensors", tensors)
    plain = tiny_checkpoint.copy(stories, tmp_path / "plain")
    assert digests(convert(folder)) == digests(convert(plain))
    (note,) = [
        note
        for note in checkpoint_source.open_checkpoint(folder).notes
        if note.startswith("names of tensors")
    ]
    assert all(word in note for word in (first + inner).replace(".", ". ").split())


def digests(file: Path) -> dict[str, bytes]:
    """Return the bytes of every tensor in a GGUF, by name."""
    header, data = read_header.read_header(file), file.read_bytes()
    return {t.name: data[t.offset : t.offset + t.nbytes] for t in header.tensors}


def test_wrapped_names_stay_if_two_would_become_equal(stories: Path, tmp_path: Path) -> None:
    folder = tiny_checkpoint.copy(stories, tmp_path / "odd")
    tensors = tiny_checkpoint.read(stories / "model.safetensors")
    tensors["_orig_mod.model.norm.weight"] = tensors["model.norm.weight"]
    tiny_checkpoint.save(folder / "model.safetensors", tensors)
    with pytest.raises(UserError, match=r"_orig_mod\.model\.norm\.weight is unknown") as raised:
        checkpoint_source.open_checkpoint(folder)
    assert "save_pretrained()" in raised.value.hint


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "fetch the whole model again"),
        (lambda tensors: tensors.update(x=np.ones(4, np.float32)), "save_pretrained()"),
    ],
)
def test_hint_says_whether_to_fetch_or_to_save_again(
    change: Callable[[dict[str, Any]], object], hint: str, stories: Path, tmp_path: Path
) -> None:
    folder = tiny_checkpoint.copy(stories, tmp_path / "odd")
    tensors = tiny_checkpoint.read(stories / "model.safetensors")
    change(tensors)
    tiny_checkpoint.save(folder / "model.safetensors", tensors)
    with pytest.raises(UserError) as raised:
        checkpoint_source.open_checkpoint(folder)
    assert hint in raised.value.hint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLn"]}, "the nearest is LlamaForCausalLM"),
        ({"architectures": None, "model_type": None}, "is a unknown"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope type is 'spiral'"),
        ({"partial_rotary_factor": 0.5}, "only a part of each head is rotary"),
        ({"hidden_act": "gelu"}, "its activation is gelu"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_hidden_layers": "5"}, "num_hidden_layers is '5'"),
        ({"num_hidden_layers": 10**9}, "llama.cpp allows 512"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"draft_vocab_size": 128}, "is an EAGLE-3 draft"),
        ({"draft_vocab_size": None, "hidden_act": "gelu"}, "its activation is gelu"),
        ({"quantization_config": {"quant_method": "aqlm"}}, r"is quantized \(AQLM\)"),
        ({"vocab_size": 2**31 - 1}, "a vocabulary of 2,147,483,647 rows"),
        ({"vocab_size": 100}, "is outside of the vocab_size 100"),
        ({"vocab_size": 600}, r"embed_tokens.weight is \[512, 64\], not \[600, 64\]"),
    ],
)
def test_unsupported_config_is_refused(
    changes: dict[str, Any], message: str, stories: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        checkpoint_source.open_checkpoint(
            tiny_checkpoint.copy(stories, tmp_path / "odd", **changes)
        )


@pytest.mark.parametrize(
    "missing", [["config.json"], ["tokenizer.model", "tokenizer.json"], ["model.safetensors"]]
)
def test_missing_file_is_named(missing: list[str], stories: Path, tmp_path: Path) -> None:
    folder = tiny_checkpoint.copy(stories, tmp_path / "odd")
    for name in missing:
        (folder / name).unlink()
    with pytest.raises(UserError) as caught:
        checkpoint_source.open_checkpoint(folder)
    assert all(name in str(caught.value) for name in missing)


INVALID_VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1.5,
    "x",
    [],
    [[]],
    {},
    {"a": []},
    10**20,
    ["x", 1],
    [{}],
]


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_any_invalid_value_is_converted_or_refused(
    name: str, stories: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(stories, tmp_path / "folder")
    if name.startswith("tokenizer"):
        (folder / "tokenizer.model").unlink()
    tiny_checkpoint.edit(
        folder / name,
        chat_template="x",
        eos_token_id=[2],
        rope_scaling={"rope_type": "linear", "factor": 2.0},
    )
    values = json.loads((folder / name).read_text())
    for path in value_paths(values):
        for invalid in INVALID_VALUES:
            changed = json.loads(json.dumps(values))
            node = changed
            for step in path[:-1]:
                node = node[step]
            node[path[-1]] = invalid
            (folder / name).write_text(json.dumps(changed))
            with contextlib.suppress(UserError):
                assert plan.plan_quantization(
                    checkpoint_source.open_checkpoint(folder), "Q8_0"
                ).layout.nbytes


def value_paths(value: Any, path: tuple[Any, ...] = (), depth: int = 5) -> list[tuple[Any, ...]]:
    """Return the paths to the values of a JSON document, each a tuple of keys and indices.

    Lists and large objects are represented by their first two items.
    """
    items = list(
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else []
    )
    paths = [path] if path else []
    for key, item in (
        (items[:2] if len(items) > 40 or isinstance(value, list) else items) if depth else []
    ):
        paths += value_paths(item, (*path, key), depth - 1)
    return paths
