"""Tiny GGUF models for tests: random weights of any shape, written with the gguf package."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np


def llama(
    path: Path,
    *,
    hidden: int = 256,
    ff: int = 256,
    layers: int = 8,
    heads: int = 4,
    kv_heads: int = 2,
    tied: bool = False,
    experts: int = 0,
    context: int = 64,
    arch: str = "llama",
    vocab: int = 300,
    seed: int = 0,
    dtype: Any = np.float32,
    extra: dict[str, tuple[int, ...]] | None = None,
    settings: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
) -> Path:
    """Write a random model with the tensors of Llama, and return `path`.

    llama.cpp can load it if `arch` is llama. `extra` adds tensors by name and shape, `settings`
    adds metadata of the architecture, and tensors whose names end with one of `without` are left
    out. A negative `vocab` gives a byte-level BPE vocabulary of that size, otherwise the
    vocabulary is SentencePiece.
    """
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(context)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(ff)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    metadata = {"rope.dimension_count": hidden // heads, **(settings or {})}
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_layer_norm_eps(1e-5)
    writer.add_file_type(0)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
    (byte_level if vocab < 0 else vocabulary)(writer, abs(vocab))
    vocab = abs(vocab)
    if arch == "gemma3":
        writer.add_sliding_window(16)
        writer.add_key_length(hidden // heads)
        writer.add_value_length(hidden // heads)
    add_by_type: dict[type, Any] = {
        str: writer.add_string,
        float: writer.add_float32,
        int: writer.add_uint32,
        bool: writer.add_bool,
    }
    for key, value in metadata.items():
        add_by_type[type(value)](f"{arch}.{key}", value)
    random = np.random.default_rng(seed)
    for name, shape in {
        **_shapes(hidden, ff, layers, heads, kv_heads, tied, experts, vocab),
        **(extra or {}),
    }.items():
        if name.endswith(without):
            continue
        norm = name.endswith("_norm.weight")
        values = random.normal(1.0 if norm else 0.0, 0.2 if norm else 0.1, shape).astype(np.float32)
        writer.add_tensor(name, values if len(shape) == 1 else values.astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def mamba(path: Path, hidden: int = 32, layers: int = 2) -> Path:
    """Write a random Mamba, whose state has no positions, and return `path`."""
    inner, state, rank, kernel = 2 * hidden, 16, 4, 4
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_context_length(1024)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(0)
    vocabulary(writer, 300)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (300, hidden),
        "output_norm.weight": (hidden,),
    }
    for i in range(layers):
        shapes |= {
            f"blk.{i}.{name}": shape
            for name, shape in {
                "attn_norm.weight": (hidden,),
                "ssm_in.weight": (2 * inner, hidden),
                "ssm_conv1d.weight": (inner, kernel),
                "ssm_conv1d.bias": (inner,),
                "ssm_x.weight": (rank + 2 * state, inner),
                "ssm_dt.weight": (inner, rank),
                "ssm_dt.bias": (inner,),
                "ssm_a": (inner, state),
                "ssm_d": (inner,),
                "ssm_out.weight": (hidden, inner),
            }.items()
        }
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        values = random.normal(0.0, 0.1, shape).astype(np.float32)
        writer.add_tensor(name, -np.exp(values) if name.endswith("ssm_a") else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def eagle3(
    path: Path,
    *,
    hidden: int = 64,
    target_hidden: int = 64,
    target_layers: tuple[int, ...] = (1, 3, 5),
    vocab: int = 300,
    draft_tokens: Any = None,
    n_layers: int = 1,
    with_embeddings: bool = False,
    with_output: bool = True,
    norm_before_fc: bool = False,
    seed: int = 5,
    target: Path | None = None,
) -> Path:
    """Write a random EAGLE-3 draft, and return `path`.

    `draft_tokens`: d2t, the token of each row of the output; None for no such map. `with_embeddings`,
    `with_output`: whether the file has these weights, or uses those of the target. `target`: a file
    with `vocab` tokens, whose vocabulary the draft gets.
    """
    writer = gguf.GGUFWriter(path, "eagle3")
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(n_layers)
    writer.add_feed_forward_length(2 * hidden)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(hidden // 4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(0)
    writer.add_array("eagle3.target_layers", list(target_layers))
    writer.add_uint32("eagle3.target_hidden_size", target_hidden)
    writer.add_bool("eagle3.norm_before_fc", norm_before_fc)
    if target:
        copy_vocabulary(writer, target)
    else:
        vocabulary(writer, vocab)
    n_inputs, rows = len(target_layers) * target_hidden, vocab
    if draft_tokens is not None:
        rows = len(draft_tokens)
        writer.add_tensor("d2t", np.asarray(draft_tokens, np.int64))
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, n_inputs),
        "output_norm.weight": (hidden,),
        "blk.0.attn_norm.weight": (hidden,),
        "blk.0.attn_norm_2.weight": (hidden,),
        "blk.0.attn_q.weight": (hidden, 2 * hidden),
        "blk.0.attn_k.weight": (hidden // 2, 2 * hidden),
        "blk.0.attn_v.weight": (hidden // 2, 2 * hidden),
        "blk.0.attn_output.weight": (hidden, hidden),
        "blk.0.ffn_norm.weight": (hidden,),
        "blk.0.ffn_gate.weight": (2 * hidden, hidden),
        "blk.0.ffn_up.weight": (2 * hidden, hidden),
        "blk.0.ffn_down.weight": (hidden, 2 * hidden),
    }
    if with_embeddings:
        shapes["token_embd.weight"] = (vocab, hidden)
    if with_output:
        shapes["output.weight"] = (rows, hidden)
    if norm_before_fc:
        shapes["enc.output_norm.weight"] = (n_inputs,)
    random = np.random.default_rng(seed)
    for name, shape in shapes.items():
        norm = "norm" in name
        values = random.normal(1.0 if norm else 0.0, 0.2 if norm else 0.1, shape)
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Add a SentencePiece vocabulary: three special tokens, all bytes, and invented words."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        *(f"\u2581w{i}" for i in range(size - 259)),
    ]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(size)])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (size - 259)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def copy_vocabulary(writer: gguf.GGUFWriter, path: Path) -> None:
    """Add the vocabulary of another GGUF file."""
    for name, field in gguf.GGUFReader(path).fields.items():
        if name.startswith("tokenizer.ggml."):
            sub_type = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)


def byte_level(writer: gguf.GGUFWriter, size: int) -> None:
    """Add a byte-level BPE vocabulary: all bytes, two special tokens, and pairs of bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    pairs = [(letters[i], letters[i + 1]) for i in range(size - 258)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*letters, "<|im_start|>", "<|im_end|>", *(a + b for a, b in pairs)])
    writer.add_token_merges([f"{a} {b}" for a, b in pairs])
    writer.add_token_types([*[1] * 256, 3, 3, *[1] * (size - 258)])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)


def gemma3(
    path: Path, hidden: int = 32, layers: int = 2, settings: dict[str, Any] | None = None
) -> Path:
    """Write a random Gemma 3 with a sliding window and all its norms, and return `path`."""
    head = hidden // 4
    extra = {
        f"blk.{i}.{role}.weight": (size,)
        for i in range(layers)
        for role, size in (
            ("post_attention_norm", hidden),
            ("post_ffw_norm", hidden),
            ("attn_q_norm", head),
            ("attn_k_norm", head),
        )
    }
    return llama(
        path,
        arch="gemma3",
        hidden=hidden,
        ff=64,
        layers=layers,
        tied=True,
        extra=extra,
        settings=settings,
    )


def _shapes(
    hidden: int,
    ff: int,
    layers: int,
    heads: int,
    kv_heads: int,
    tied: bool,
    experts: int,
    vocab: int,
) -> dict[str, tuple[int, ...]]:
    kv, expert_axis = hidden // heads * kv_heads, (experts,) if experts else ()
    suffix = "_exps" if experts else ""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab, hidden),
        "output_norm.weight": (hidden,),
    }
    for i in range(layers):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (hidden,),
            f"blk.{i}.attn_q.weight": (hidden, hidden),
            f"blk.{i}.attn_k.weight": (kv, hidden),
            f"blk.{i}.attn_v.weight": (kv, hidden),
            f"blk.{i}.attn_output.weight": (hidden, hidden),
            f"blk.{i}.ffn_norm.weight": (hidden,),
            f"blk.{i}.ffn_gate{suffix}.weight": (*expert_axis, ff, hidden),
            f"blk.{i}.ffn_up{suffix}.weight": (*expert_axis, ff, hidden),
            f"blk.{i}.ffn_down{suffix}.weight": (*expert_axis, hidden, ff),
        }
        if experts:
            shapes[f"blk.{i}.ffn_gate_inp.weight"] = (experts, hidden)
    return shapes if tied else shapes | {"output.weight": (vocab, hidden)}
