"""Checkpoint folders with one oddity, as they were met: each is converted and runs, or gets one clear
line.

A case has the words of the error of `convert`, or "" where the folder must be converted. The tensors
are compared with those of the folder without an oddity, and the end token with that of the gguf
package.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from quant.gguf.header import read_file_header
from tests.fixtures.cli import Done
from tests.quant import tiny_checkpoint

HIDDEN, FF, LAYERS, HEADS, KV_HEADS = 64, 128, 2, 4, 2
SPECIAL = ("<|bos|>", "<|base_end|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<|turn_over|>")
APPLE_DOUBLE = b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        " + bytes(64)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Tensors = dict[str, np.ndarray]


def byte_letters() -> list[str]:
    """Return the letters by which byte-level BPE writes the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def special_token(index: int, content: str) -> dict[str, Any]:
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    return {"id": index, "content": content, **dict.fromkeys(flags, False), "special": True}


def tokenizer() -> dict[str, Any]:
    """Return a tokenizer.json of byte-level BPE with two merges."""
    vocabulary = {letter: index for index, letter in enumerate([*byte_letters(), "Ġt", "he"])}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [
            special_token(len(vocabulary) + number, text) for number, text in enumerate(SPECIAL)
        ],
        "pre_tokenizer": {**byte_level, "trim_offsets": True},
        "decoder": {**byte_level, "trim_offsets": True},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [["Ġ", "t"], ["h", "e"]]},
    }


def weights(vocabulary: int, kv_heads: int = KV_HEADS) -> Tensors:
    """Return the tensors of a Llama whose head is tied to the embedding."""
    random, kv = np.random.default_rng(0), HIDDEN // HEADS * kv_heads
    shapes = {"model.embed_tokens": (vocabulary, HIDDEN), "model.norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"model.layers.{layer}.{name}": shape
            for name, shape in {
                "self_attn.q_proj": (HIDDEN, HIDDEN),
                "self_attn.k_proj": (kv, HIDDEN),
                "self_attn.v_proj": (kv, HIDDEN),
                "self_attn.o_proj": (HIDDEN, HIDDEN),
                "mlp.gate_proj": (FF, HIDDEN),
                "mlp.up_proj": (FF, HIDDEN),
                "mlp.down_proj": (HIDDEN, FF),
                "input_layernorm": (HIDDEN,),
                "post_attention_layernorm": (HIDDEN,),
            }.items()
        }
    return {
        f"{name}.weight": np.ones(shape) if len(shape) == 1 else random.standard_normal(shape) * 0.1
        for name, shape in shapes.items()
    }


@dataclass
class Checkpoint:
    """The documents and the tensors of a checkpoint folder. `files`: further files, by name, or
    replaced ones. `shards`: the tensors of each file, if there are several.
    """

    tokens: dict[str, Any] = field(default_factory=tokenizer)
    config: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)
    tensors: Tensors = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    shards: dict[str, list[str]] = field(default_factory=dict)
    dtype: str = "BF16"

    def __post_init__(self) -> None:
        size = len(self.tokens["model"]["vocab"]) + len(SPECIAL)
        self.tensors = weights(size)
        self.config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": FF,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "hidden_act": "silu",
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "vocab_size": size,
            "tie_word_embeddings": True,
            "bos_token_id": 258,
            "eos_token_id": 259,
            "torch_dtype": "bfloat16",
        }
        self.settings = {
            "bos_token": "<|bos|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|pad|>",
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": TEMPLATE,
        }

    def write(self, folder: Path) -> Path:
        """Write the folder, and return it."""
        folder.mkdir()
        for name, document in (
            ("config.json", self.config),
            ("tokenizer.json", self.tokens),
            ("tokenizer_config.json", self.settings),
            ("generation_config.json", self.generation),
        ):
            if document:
                (folder / name).write_text(json.dumps(document), encoding="utf-8")
        for name, tensors in (self.shards or {"model.safetensors": list(self.tensors)}).items():
            tiny_checkpoint.save(
                folder / name, {tensor: self.tensors[tensor] for tensor in tensors}, self.dtype
            )
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        return folder


def end_with(c: Checkpoint, text: str) -> None:
    """Let the tokenizer end turns with a new token, as finetunes do that keep the
    generation_config.json of their base.
    """
    c.tokens["added_tokens"][-1]["content"] = c.settings["eos_token"] = text
    c.settings["chat_template"] = TEMPLATE.replace("<|im_end|>", text)
    c.generation["eos_token_id"] = 259


def add_pad(c: Checkpoint) -> None:
    """Add a token without a row in the embedding."""
    c.tokens["added_tokens"].append(special_token(c.config["vocab_size"], "[PAD]"))
    c.settings["pad_token"] = "[PAD]"


def set_rope(c: Checkpoint, **values: Any) -> None:
    del c.config["rope_theta"]
    c.config["rope_parameters"] = values


def prefix_names(c: Checkpoint, old: str, new: str) -> None:
    c.tensors = {new + name.removeprefix(old): values for name, values in c.tensors.items()}


def split(c: Checkpoint, last_of_first: int, first_of_second: int) -> None:
    """Put the tensors into two files with an index; a tensor may be in both."""
    names = list(c.tensors)
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    c.shards = {first: names[:last_of_first], second: names[first_of_second:]}
    weight_map = dict.fromkeys(names, second) | dict.fromkeys(names[:last_of_first], first)
    index = {"metadata": {}, "weight_map": weight_map}
    c.files["model.safetensors.index.json"] = json.dumps(index).encode()


def add_mac_files(c: Checkpoint) -> None:
    names = ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja")
    c.files |= {f"._{name}": APPLE_DOUBLE for name in names}


ADAPTER = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "org/base"}).encode()


def add_adapter(c: Checkpoint) -> None:
    c.files |= {"adapter_config.json": ADAPTER, "adapter_model.safetensors": b"not read"}


def move_template(c: Checkpoint, before: bytes = b"", line_end: str = "\n") -> None:
    text = c.settings.pop("chat_template").replace("\n", line_end)
    c.files["chat_template.jinja"] = before + text.encode()


def add_marks(c: Checkpoint) -> None:
    """Put a byte-order mark before the JSON of two files."""
    for name, document in (("config.json", c.config), ("tokenizer_config.json", c.settings)):
        c.files[name] = b"\xef\xbb\xbf" + json.dumps(document).encode()


def list_templates(c: Checkpoint) -> None:
    c.settings["chat_template"] = [
        {"name": "default", "template": TEMPLATE},
        {"name": "tool_use", "template": "{{ tools | tojson }}" + TEMPLATE},
    ]


def join_merges(c: Checkpoint) -> None:
    c.tokens["model"]["merges"] = [" ".join(pair) for pair in c.tokens["model"]["merges"]]


def set_nulls(c: Checkpoint) -> None:
    keys = ("head_dim", "rope_scaling", "sliding_window", "attention_bias", "pad_token_id")
    c.config |= dict.fromkeys((*keys, "quantization_config", "num_key_value_heads"))
    c.tensors = weights(c.config["vocab_size"], kv_heads=HEADS)


def set_nan(c: Checkpoint) -> None:
    c.tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = np.nan


def add_tensor(c: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
    c.tensors[name] = np.zeros(shape)


BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
# Name -> the change of the plain folder, the words of the error, and the words of its hint.
CASES: dict[str, tuple[Callable[[Checkpoint], Any], str, str]] = {
    "plain": (lambda c: None, "", ""),
    "custom-eos": (lambda c: end_with(c, "<|turn_over|>"), "", ""),
    "custom-eos-plain": (lambda c: end_with(c, "</turn>"), "", ""),
    "extra-special-list": (
        lambda c: c.settings.update(extra_special_tokens=["<|im_start|>", "<|im_end|>"]),
        "",
        "",
    ),
    "pad-beyond": (
        add_pad,
        "token 264 ('[PAD]') is outside of the",
        "resize_token_embeddings(265)",
    ),
    "no-prefix": (lambda c: prefix_names(c, "model.", ""), "", ""),
    "rope-parameters": (lambda c: set_rope(c, rope_type="default", rope_theta=10000), "", ""),
    "rope-yarn-int": (
        lambda c: set_rope(
            c,
            rope_type="yarn",
            rope_theta=10000,
            factor=4,
            beta_fast=32,
            beta_slow=1,
            original_max_position_embeddings=128,
        ),
        "",
        "",
    ),
    "tied-with-head": (
        lambda c: c.tensors.update({"lm_head.weight": c.tensors["model.embed_tokens.weight"]}),
        "",
        "",
    ),
    "tie-missing": (
        lambda c: c.config.pop("tie_word_embeddings"),
        "1 tensor does not fit its config.json: output.weight is missing",
        "fetch the whole model again",
    ),
    "template-list": (list_templates, "", ""),
    "template-bom": (lambda c: move_template(c, b"\xef\xbb\xbf"), "", ""),
    "template-crlf": (lambda c: move_template(c, line_end="\r\n"), "", ""),
    "config-bom": (add_marks, "", ""),
    "merges-strings": (join_merges, "", ""),
    "dup-shards": (lambda c: split(c, 9, 9), "", ""),
    "dup-in-shards": (lambda c: split(c, 9, 7), "", ""),
    "appledouble": (add_mac_files, "", ""),
    "adapter-beside": (add_adapter, "", ""),
    "empty-tensor": (
        lambda c: add_tensor(c, "model.layers.0.extra.weight", (0,)),
        "tensor model.layers.0.extra.weight has no values: its shape is [0]",
        "save the model again",
    ),
    "zero3-empty": (
        lambda c: add_tensor(c, "model.norm.weight", (0,)),
        "tensor model.norm.weight has no values: its shape is [0]",
        "zero_to_fp32.py",
    ),
    "torch-compile": (lambda c: prefix_names(c, "", "_orig_mod."), "", ""),
    "data-parallel": (lambda c: prefix_names(c, "", "module."), "", ""),
    "bnb8": (
        lambda c: add_tensor(c, "model.layers.0.mlp.down_proj.SCB", (HIDDEN,)),
        "1 tensor does not fit its config.json: model.layers.0.mlp.down_proj.SCB is unknown",
        "save_pretrained()",
    ),
    "quant-config-left": (lambda c: c.config.update(quantization_config=BNB), "", ""),
    "eos-list": (lambda c: c.generation.update(eos_token_id=[259, 261, 263]), "", ""),
    "eos-many": (lambda c: c.generation.update(eos_token_id=[258, 259, 260, 262, 263]), "", ""),
    "nan": (set_nan, "tensor blk.0.ffn_up.weight contains NaN", "the source is damaged"),
    "null-fields": (set_nulls, "", ""),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The tensors of the converted folder without an oddity."""
    from quant.convert import checkpoint_source
    from quant.quantize import plan, write

    folder = tmp_path_factory.mktemp("plain")
    source = checkpoint_source.open_checkpoint(Checkpoint().write(folder / "plain"))
    write.write_model(plan.plan_quantization(source, "BF16"), folder / "plain.gguf", threads=1)
    return read_tensors(folder / "plain.gguf")


def read_tensors(file: Path) -> dict[str, bytes]:
    """Return the bytes of every tensor, by name."""
    data = file.read_bytes()
    tensors = read_file_header(file).tensors
    return {t.name: data[t.offset : t.offset + t.nbytes] for t in tensors}


@pytest.mark.parametrize("name", CASES)
def test_an_odd_folder_is_converted_and_runs_or_gets_one_clear_line(
    name: str, plain: dict[str, bytes], tmp_path: Path, llmcli: Callable[..., Done]
) -> None:
    change, message, hint = CASES[name]
    checkpoint = Checkpoint()
    change(checkpoint)
    folder, out = checkpoint.write(tmp_path / "odd"), tmp_path / "odd.gguf"
    done = llmcli("convert", str(folder), "-o", str(out), "--threads", "1")
    lines = [line for line in done.err.splitlines() if line.startswith(("error: ", "hint: "))]
    if message:
        assert (done.code, len(lines)) == (1, 2), done.err
        assert message in lines[0]
        assert hint in lines[1]
        return
    assert (done.code, lines) == (0, []), done.err
    assert read_tensors(out) == plain or name == "null-fields"  # it has more heads
    for file in folder.glob("*.json"):  # the package does not read byte-order marks
        file.write_bytes(file.read_bytes().removeprefix(b"\xef\xbb\xbf"))
    vocabulary = gguf.SpecialVocab(folder, n_vocab=checkpoint.config["vocab_size"])
    eos = gguf.GGUFReader(out).get_field("tokenizer.ggml.eos_token_id")
    assert eos
    assert eos.contents() == vocabulary.special_token_ids["eos"]
    done = llmcli("run", str(out), "Hi", "-n", "1", "-t", "1", "-c", "64")
    assert done.code == 0, done.err


def test_a_folder_with_only_an_adapter_is_called_a_lora(
    tmp_path: Path, llmcli: Callable[..., Done]
) -> None:
    (tmp_path / "adapter_config.json").write_bytes(ADAPTER)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"not read")
    for words in (["convert"], ["quantize", "--q8_0"], ["run", "Hi"], ["show"]):
        done = llmcli(words[0], str(tmp_path), *words[1:])
        assert done.code == 1
        assert done.err.splitlines() == [
            f"error: {tmp_path} is a LoRA adapter of org/base, not a complete model",
            "hint: merge it into that model first: merge_and_unload() of the peft package, then "
            "save_pretrained(); or make a GGUF adapter for llama-cli: llmcli convert --lora FOLDER",
        ]
