"""Tiny random BERT and T5 encoders for tests: as GGUF files, and with the same weights in
transformers, which computes the expected results.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "hello",
    "world",
    "the",
    "cat",
    "sat",
    "##s",
    "on",
    "a",
    "mat",
]
HIDDEN, LAYERS, HEADS, FF, CONTEXT = 32, 2, 4, 64, 64


def oracle(seed: int = 0) -> Any:
    """Return transformers' BertModel with random weights. Skip the test without torch."""
    torch = pytest.importorskip("torch")
    import transformers

    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=FF,
        max_position_embeddings=CONTEXT,
        hidden_act="gelu",
        layer_norm_eps=1e-12,
    )
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def bert(
    path: Path,
    pooling: int | None = 1,
    model: Any = None,
    head: dict[str, np.ndarray] | None = None,
    labels: tuple[str, ...] = (),
) -> Path:
    """Write a BERT encoder to a GGUF file, and return its path. `pooling`: a number of enum
    llama_pooling_type (llama.h). `model`: the weights; None means random ones. `head`: additional
    tensors, for a model that ranks. `labels`: the labels of its classifier.
    """
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_file_type(0)
    if pooling is not None:
        writer.add_pooling_type(gguf.PoolingType(pooling))
    if labels:
        writer.add_classifier_output_labels(labels)
    writer.add_token_type_count(2)
    writer.add_tokenizer_model("bert")
    # WordPiece as convert_hf_to_gguf.py writes it: the first piece of a word begins with U+2581.
    special = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}
    writer.add_token_list(
        [w if w in special else w[2:] if w.startswith("##") else "\u2581" + w for w in WORDS]
    )
    writer.add_token_types([3 if w in special else 1 for w in WORDS])
    for name, number in (("pad", 0), ("unk", 1), ("sep", 3), ("mask", 4)):
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(3)
    for name, values in ((_weights(model) if model else _random()) | (head or {})).items():
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
}
BLOCK = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}


def _names() -> dict[str, str]:
    block_names = {
        f"encoder.layer.{i}.{k}": f"blk.{i}.{v}" for i in range(LAYERS) for k, v in BLOCK.items()
    }
    return NAMES | block_names


def _weights(model: Any) -> dict[str, np.ndarray]:
    state = model.state_dict()
    return {
        f"{ours}.{end}": state[f"{theirs}.{end}"].numpy()
        for theirs, ours in _names().items()
        for end in ("weight", "bias")
        if f"{theirs}.{end}" in state
    }


def _random() -> dict[str, np.ndarray]:
    random, weights = np.random.default_rng(0), {}
    shapes = {
        "token_embd": (len(WORDS), HIDDEN),
        "position_embd": (CONTEXT, HIDDEN),
        "token_types": (2, HIDDEN),
        "ffn_up": (FF, HIDDEN),
        "ffn_down": (HIDDEN, FF),
    }
    for name in _names().values():
        role = name.rsplit(".", 1)[-1]
        shape = (HIDDEN,) if role.endswith("norm") else shapes.get(role, (HIDDEN, HIDDEN))
        weights[f"{name}.weight"] = random.normal(1.0 if role.endswith("norm") else 0.0, 0.1, shape)
        if not role.endswith("embd") and role != "token_types":
            weights[f"{name}.bias"] = random.normal(0.0, 0.1, shape[:1])
    return weights


PIECES = [
    "<pad>",
    "</s>",
    "<unk>",
    *(f"\u2581{word}" for word in ("hello", "world", "the", "cat")),
    *"abcdefghij",
]
BUCKETS = 32
T5_NAMES = {
    "layer.0.SelfAttention.q": "attn_q",
    "layer.0.SelfAttention.k": "attn_k",
    "layer.0.SelfAttention.v": "attn_v",
    "layer.0.SelfAttention.o": "attn_o",
    "layer.0.layer_norm": "attn_norm",
    "layer.1.DenseReluDense.wi": "ffn_up",
    "layer.1.DenseReluDense.wo": "ffn_down",
    "layer.1.layer_norm": "ffn_norm",
}


def t5_oracle() -> Any:
    """Return transformers' T5EncoderModel with random weights. Skip the test without torch."""
    torch = pytest.importorskip("torch")
    import transformers

    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=len(PIECES),
        d_model=HIDDEN,
        d_kv=HIDDEN // HEADS,
        d_ff=FF,
        num_layers=LAYERS,
        num_heads=HEADS,
        relative_attention_num_buckets=BUCKETS,
        feed_forward_proj="relu",
    )
    return transformers.T5EncoderModel(config).eval()


def t5(path: Path, model: Any) -> Path:
    """Write the weights of a T5EncoderModel to a GGUF file, and return its path."""
    writer = gguf.GGUFWriter(path, "t5encoder")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_key_length(HIDDEN // HEADS)
    writer.add_value_length(HIDDEN // HEADS)
    writer.add_relative_attn_buckets_count(BUCKETS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_layer_norm_eps(1e-6)
    writer.add_file_type(0)
    writer.add_tokenizer_model("t5")
    writer.add_token_list(PIECES)
    writer.add_token_scores([-float(i) for i in range(len(PIECES))])
    writer.add_token_types([3, 3, 2, *[1] * (len(PIECES) - 3)])
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
    writer.add_add_eos_token(True)
    writer.add_add_space_prefix(True)
    state = model.state_dict()
    names = {
        "shared": "token_embd",
        "encoder.final_layer_norm": "enc.output_norm",
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias": "enc.blk.0.attn_rel_b",
    }
    names |= {
        f"encoder.block.{i}.{k}": f"enc.blk.{i}.{v}"
        for i in range(LAYERS)
        for k, v in T5_NAMES.items()
    }
    for theirs, ours in names.items():
        writer.add_tensor(
            f"{ours}.weight", np.ascontiguousarray(state[f"{theirs}.weight"].numpy(), np.float32)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
