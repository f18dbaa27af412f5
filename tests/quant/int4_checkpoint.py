"""Checkpoints of a mixture of experts (Qwen3-MoE) with experts of four bits, of any size: the
matrices have their shapes, but all values are zero.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np

from quant.checkpoint.safetensors import DTYPE_BYTES, INDEX_FILE
from tests.quant import tiny_checkpoint

GROUP = 32
QUANTIZATION = {
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {"weights": {"num_bits": 4, "group_size": GROUP}, "targets": ["Linear"]}
        },
    },
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "bitsandbytes": {"quant_method": "bitsandbytes"},
}
# Name of a tensor -> (dtype, shape, bytes if they are not zeros).
Table = dict[str, tuple[str, tuple[int, ...], bytes]]


@dataclass(frozen=True)
class Size:
    """The size of a model: its layers, experts, and the widths of the residual stream and of an
    expert.
    """

    layers: int
    experts: int
    hidden: int = 64
    ff: int = 32

    @property
    def weights(self) -> int:
        """Number of weights of the experts."""
        return self.layers * self.experts * 3 * self.hidden * self.ff


def quantized_matrix(method: str, name: str, rows: int, columns: int) -> Table:
    """Return the tensors of one matrix of four bits."""
    base, groups = name.removesuffix("weight"), columns // GROUP
    if method == "compressed-tensors":
        return {
            f"{name}_packed": ("I32", (rows, columns // 8), b""),
            f"{name}_scale": ("BF16", (rows, groups), b""),
            f"{name}_shape": ("I64", (2,), struct.pack("<qq", rows, columns)),
        }
    if method == "modelopt":
        return {
            name: ("U8", (rows, columns // 2), b""),
            f"{name}_scale": ("F8_E4M3", (rows, columns // 16), b""),
            f"{name}_scale_2": ("F32", (), b"\0\0\x80?"),
        }
    if method == "bitsandbytes":
        state = json.dumps({"shape": [rows, columns], "blocksize": 64}).encode()
        return {
            name: ("U8", (rows * columns // 2, 1), b""),
            f"{name}.absmax": ("F32", (-(-rows * columns // 64),), b""),
            f"{name}.quant_map": ("F32", (16,), b""),
            f"{name}.quant_state.bitsandbytes__nf4": ("U8", (len(state),), state),
        }
    words = (columns // 8, rows) if method == "gptq" else (columns, rows // 8)
    index = np.arange(columns, dtype=np.int32) // GROUP
    return {
        f"{base}qweight": ("I32", words, b""),
        f"{base}qzeros": ("I32", (groups, rows // 8), b""),
        f"{base}scales": ("F16", (groups, rows), b""),
        **({f"{base}g_idx": ("I32", (columns,), index.tobytes())} if method == "gptq" else {}),
    }


def layer_tensors(method: str, layer: int, size: Size) -> Table:
    """Return the tensors of one layer. Only the experts are quantized."""
    hidden, ff, stem = size.hidden, size.ff, f"model.layers.{layer}."
    floats = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_norm.weight": (8,),
        "self_attn.k_norm.weight": (8,),
        "mlp.gate.weight": (size.experts, hidden),
        "self_attn.q_proj.weight": (64, hidden),
        "self_attn.k_proj.weight": (32, hidden),
        "self_attn.v_proj.weight": (32, hidden),
        "self_attn.o_proj.weight": (hidden, 64),
    }
    table: Table = {stem + name: ("BF16", shape, b"") for name, shape in floats.items()}
    for expert in range(size.experts):
        for role, shape in (("gate", (ff, hidden)), ("up", (ff, hidden)), ("down", (hidden, ff))):
            name = f"{stem}mlp.experts.{expert}.{role}_proj.weight"
            table |= quantized_matrix(method, name, *shape)
    return table


@dataclass
class ZeroFile:
    """A safetensors file that exists only as a description. Implements quant.source.blob.Blob.
    `reads`: offset and length of every read behind the header.
    """

    path: Path
    table: Table
    reads: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        offset, header = 0, {}
        self.known: dict[int, bytes] = {}
        for name, (dtype, shape, data) in self.table.items():
            nbytes = prod(shape) * DTYPE_BYTES[dtype]
            header[name] = {
                "dtype": dtype,
                "shape": list(shape),
                "data_offsets": [offset, offset + nbytes],
            }
            self.known[offset] = data
            offset += nbytes
        text = json.dumps(header).encode()
        self.head = struct.pack("<Q", len(text)) + text
        self.size = len(self.head) + offset

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        if offset + nbytes <= len(self.head):
            return np.frombuffer(self.head[offset : offset + nbytes], np.uint8)
        self.reads.append((offset, nbytes))
        data = self.known.get(offset - len(self.head), b"")
        return np.frombuffer(data.ljust(nbytes, b"\0")[:nbytes], np.uint8)

    def finish_check(self, was_resumed: bool) -> None:
        pass

    def content(self) -> bytes:
        """Return all bytes of the file."""
        data = bytearray(self.size)
        data[: len(self.head)] = self.head
        for offset, known in self.known.items():
            start = len(self.head) + offset
            data[start : start + len(known)] = known
        return bytes(data)


def write_folder(stories: Path, target: Path, method: str, size: Size) -> None:
    """Write the small files of a checkpoint: its config, its tokenizer and its index."""
    tiny_checkpoint.copy(
        stories,
        target,
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        head_dim=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_experts=size.experts,
        num_experts_per_tok=2,
        moe_intermediate_size=size.ff,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=True,
        quantization_config=QUANTIZATION[method],
    )
    (target / "model.safetensors").unlink()
    index = {name: file.path.name for file in files(target, method, size) for name in file.table}
    (target / INDEX_FILE).write_text(json.dumps({"weight_map": index}))


def files(folder: Path, method: str, size: Size) -> Iterator[ZeroFile]:
    """Yield the safetensors of a checkpoint, one for each layer."""
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    for layer in range(size.layers):
        table = layer_tensors(method, layer, size)
        if layer == 0:
            table["model.embed_tokens.weight"] = ("BF16", (vocabulary, size.hidden), b"")
            table["model.norm.weight"] = ("BF16", (size.hidden,), b"")
        yield ZeroFile(folder / f"model-{layer + 1:05}-of-{size.layers:05}.safetensors", table)
