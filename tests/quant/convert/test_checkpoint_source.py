"""A converted checkpoint computes the same function; transformers is the reference where it is
installed.
"""

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
from quant.convert.archs.base import rope_row_order
from quant.errors import UserError
from quant.model_file import load_checks, read_header
from quant.quantize import plan, write
from tests.quant import tiny_checkpoint

TEXT = list(np.random.default_rng(3).integers(3, 500, 320))


@pytest.fixture
def made(tmp_path: Path) -> Callable[[Path, str], Path]:
    """Quantize a folder into the test's own place."""

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
    """llama.cpp's logits at every position [tokens, vocabulary]."""
    model = llama(path, logits_all=True)
    model.eval([int(token) for token in tokens])
    scores = np.array(model.scores[: len(tokens)])
    model.close()
    return scores


def oracle(folder: Path, tokens: list[int]) -> np.ndarray:
    """transformers' logits in float32."""
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


def assert_same_choice(ours: np.ndarray, theirs: np.ndarray) -> None:
    """The likeliest token is the same wherever it leads by more than rounding."""
    best = np.sort(theirs, axis=-1)[:, -2:]
    clear = best[:, 1] - best[:, 0] > 1e-3
    assert clear.mean() > 0.95
    assert (ours.argmax(-1) == theirs.argmax(-1))[clear].all()


def random_llama(
    folder: Path, stories: Path, shards: int = 1, dtype: str = "F32", **changes: Any
) -> Path:
    """A random Llama with scaled weights, so that a wrong row, norm or bias shows in the logits."""
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
        places = {name: files[names.index(name) % shards] for name in names}
        tiny_checkpoint.edit(folder / "model.safetensors.index.json", weight_map=places)
    return folder


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, ff, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    wide, narrow = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (512, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (512, hidden)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        found |= {
            f"{at}.self_attn.{role}_proj.weight": (rows, hidden)
            for role, rows in zip("qkv", (wide, narrow, narrow), strict=True)
        }
        if config["attention_bias"]:
            found |= {
                f"{at}.self_attn.{role}_proj.bias": (rows,)
                for role, rows in zip("qkv", (wide, narrow, narrow), strict=True)
            }
            found[f"{at}.self_attn.o_proj.bias"] = (hidden,)
        found |= {
            f"{at}.self_attn.o_proj.weight": (hidden, wide),
            f"{at}.mlp.gate_proj.weight": (ff, hidden),
            f"{at}.mlp.up_proj.weight": (ff, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, ff),
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
        }
    return found


def test_a_trained_model_computes_what_transformers_computes(stories: Path, made) -> None:
    theirs, ours = oracle(stories, TEXT), logits(made(stories), TEXT)
    assert nmse(ours, theirs) < 1e-6
    assert_same_choice(ours, theirs)


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
def test_random_models_compute_what_transformers_computes(
    changes: dict[str, Any], stories: Path, made, tmp_path: Path
) -> None:
    folder = random_llama(tmp_path / "random", stories, **changes)
    theirs, ours = oracle(folder, TEXT), logits(made(folder), TEXT)
    assert nmse(ours, theirs) < 1e-6
    assert_same_choice(ours, theirs)


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K_M"])
def test_a_converted_story_goes_on_as_it_was_trained_to(kind: str, stories: Path, made) -> None:
    model = llama(made(stories, kind))
    answer = model("Once upon a time", max_tokens=32, temperature=0)["choices"][0]["text"]
    model.close()
    assert answer.startswith(
        ", there was a little girl named Lily. She loved to play outside in the park"
    )


def test_shards_give_the_same_tensors_as_one_file(stories: Path, tmp_path: Path, made) -> None:
    one = made(random_llama(tmp_path / "one", stories))
    many = made(random_llama(tmp_path / "many", stories, shards=3))
    from tests.quant.upstream import content

    assert content(one) == content(many)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_floats_stay_as_they_are_and_norms_become_f32(
    dtype: str, stories: Path, tmp_path: Path, made
) -> None:
    header = read_header.read_header(
        made(random_llama(tmp_path / "half", stories, dtype=dtype), dtype)
    )
    types = {tensor.name: tensor.type for tensor in header.tensors}
    assert types["blk.0.attn_q.weight"] == dtype
    assert {
        types["blk.0.attn_norm.weight"],
        types["blk.0.attn_q.bias"],
        types["output_norm.weight"],
    } == {"F32"}


def test_both_spellings_of_rotary_settings_give_the_same_file(
    stories: Path, tmp_path: Path, made
) -> None:
    old = random_llama(tmp_path / "a" / "m", stories, rope_theta=500000.0, rope_scaling=LLAMA3)
    new = random_llama(
        tmp_path / "b" / "m",
        stories,
        rope_theta=None,
        rope_parameters={**LLAMA3, "rope_theta": 500000.0},
    )
    first = made(old).read_bytes()
    assert made(new).read_bytes() == first


def test_straight_to_k_quants_is_the_same_as_through_a_float_file(
    stories: Path, tmp_path: Path, made
) -> None:
    from tests.quant.upstream import content

    folder = random_llama(
        tmp_path / "wide", stories, hidden_size=256, intermediate_size=512, head_dim=64
    )
    through = tmp_path / "through.gguf"
    write.write_model(
        plan.plan_quantization(write.open_gguf(made(folder)), "Q4_K_M"), through, threads=1
    )
    assert content(made(folder, "Q4_K_M")) == content(through)
    assert "Q4_K" in read_header.read_header(through).type_totals


def test_rows_of_a_head_are_dealt_out_in_pairs() -> None:
    assert rope_row_order(2, 6) == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_a_head_that_copies_the_embedding_of_a_tied_model_is_left_out(
    stories: Path, tmp_path: Path, made
) -> None:
    folder = tiny_checkpoint.copy(stories, tmp_path / "copy")
    tensors = tiny_checkpoint.read(stories / "model.safetensors")
    tiny_checkpoint.save(
        folder / "model.safetensors",
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]},
    )
    assert "output.weight" not in {
        tensor.name for tensor in read_header.read_header(made(folder)).tensors
    }
    tiny_checkpoint.save(
        folder / "model.safetensors",
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * 2},
    )
    with pytest.raises(
        UserError, match=r"ties the head to the embedding, but lm_head\.weight is different"
    ):
        checkpoint_source.open_checkpoint(folder)


def test_everything_that_does_not_fit_is_told_at_once(stories: Path, tmp_path: Path) -> None:
    folder = tiny_checkpoint.copy(stories, tmp_path / "odd")
    tensors = tiny_checkpoint.read(stories / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_norm.scale"] = np.zeros(8, np.float32)
    tensors["model.norm.weight"] = np.ones(63, np.float32)
    tiny_checkpoint.save(folder / "model.safetensors", tensors)
    with pytest.raises(UserError) as caught:
        checkpoint_source.open_checkpoint(folder)
    for said in (
        "3 tensors",
        "q_norm.scale is unknown",
        "blk.1.ffn_up.weight is missing",
        "model.norm.weight is [63], not [64]",
    ):
        assert said in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
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
        ({"quantization_config": {"quant_method": "awq"}}, r"is quantized \(AWQ\)"),
        ({"vocab_size": 2**31 - 1}, "a vocabulary of 2,147,483,647 rows"),
        ({"vocab_size": 100}, "is outside of the vocab_size 100"),
        ({"vocab_size": 600}, r"embed_tokens.weight is \[512, 64\], not \[600, 64\]"),
    ],
)
def test_a_config_that_cannot_be_followed_is_refused(
    changes: dict[str, Any], said: str, stories: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said):
        checkpoint_source.open_checkpoint(
            tiny_checkpoint.copy(stories, tmp_path / "odd", **changes)
        )


@pytest.mark.parametrize(
    "missing", [["config.json"], ["tokenizer.model", "tokenizer.json"], ["model.safetensors"]]
)
def test_a_folder_that_lacks_something_is_told_what(
    missing: list[str], stories: Path, tmp_path: Path
) -> None:
    folder = tiny_checkpoint.copy(stories, tmp_path / "odd")
    for name in missing:
        (folder / name).unlink()
    with pytest.raises(UserError) as caught:
        checkpoint_source.open_checkpoint(folder)
    assert all(name in str(caught.value) for name in missing)


STRANGE: list[Any] = [None, True, -1, 0, 1.5, "x", [], [[]], {}, {"a": []}, 10**20, ["x", 1], [{}]]


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_any_value_of_a_wrong_kind_is_followed_or_refused(
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
    for path in places(values):
        for strange in STRANGE:
            changed = json.loads(json.dumps(values))
            node = changed
            for step in path[:-1]:
                node = node[step]
            node[path[-1]] = strange
            (folder / name).write_text(json.dumps(changed))
            with contextlib.suppress(UserError):
                assert plan.plan_quantization(
                    checkpoint_source.open_checkpoint(folder), "Q8_0"
                ).layout.nbytes


def places(value: Any, path: tuple[Any, ...] = (), depth: int = 5) -> list[tuple[Any, ...]]:
    """Paths to the values of a document, the first two of each list or large object."""
    items = list(
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else []
    )
    found = [path] if path else []
    for key, item in (
        (items[:2] if len(items) > 40 or isinstance(value, list) else items) if depth else []
    ):
        found += places(item, (*path, key), depth - 1)
    return found
