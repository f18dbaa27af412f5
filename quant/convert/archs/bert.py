"""BERT and XLM-RoBERTa: encoders for embeddings, and rerankers with a head that scores a text.

Follows BertModel and XLMRobertaModel of llama.cpp (conversion/bert.py, src/models/bert.cpp).
Differences: BERT's classifiers keep their pooler, whose tanh llama.cpp computes as for RoBERTa's
head; a classifier gets the pooling type of rerankers; and labels without names are written, too.
llama.cpp computes GELU from a table of 16-bit values, so that vectors differ by about 0.0002 of
their length.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quant.checkpoint import tensor_views
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import Tensors
from quant.convert.parts import block_tensors, checks, layout
from quant.convert.parts.base import POOLING_FILE, Arch, ArchKey, Shapes

MEAN, CLS, LAST, RANK = 1, 2, 3, 4  # llama_pooling_type
# Modes of sentence-transformers, by their name and by the setting of older versions.
POOLING_MODES = {"mean": MEAN, "cls": CLS, "lasttoken": LAST}
POOLING_SETTINGS = {
    "pooling_mode_mean_tokens": MEAN,
    "pooling_mode_cls_token": CLS,
    "pooling_mode_lasttoken": LAST,
}
PREFIX = re.compile(r"^(?:bert|roberta|model)\.")
POSITIONS_NAME = "embeddings.position_embeddings.weight"
# Endings of the first checkpoints, which TensorFlow wrote.
OLD_ENDINGS = {".gamma": ".weight", ".beta": ".bias"}
UNUSED_PARTS = ("cls.", "lm_head.", "pooler.")
DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}


def is_classifier(config: CheckpointConfig) -> bool:
    """Return whether the model has a head that scores a text, as rerankers have."""
    classes = config.values.get("architectures")
    return isinstance(classes, list) and any(
        str(name).endswith("ForSequenceClassification") for name in classes
    )


def labels(config: CheckpointConfig) -> list[str]:
    """Return the names of the scores, as transformers names them by default."""
    names = config.values.get("id2label")
    if not isinstance(names, dict):
        count = config.get_int("num_labels", default=2)
        return [f"LABEL_{index}" for index in range(min(count, 1 << 16))]
    return [str(name) for _, name in sorted(names.items(), key=lambda item: _as_number(item[0]))]


def _as_number(text: object) -> int:
    """Return the number of a label, 0 for anything else."""
    digits = str(text)
    return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) < 10 else 0


def position_offset(config: CheckpointConfig) -> int:
    """Return the number of the position embedding's first rows that are never used. RoBERTa counts
    positions from the row after the padding token's.
    """
    if config.values.get("model_type") not in ("roberta", "xlm-roberta", "camembert"):
        return 0
    padding = config.values.get("pad_token_id")
    return padding + 1 if type(padding) is int and 0 <= padding < 1 << 16 else 0


def position_count(config: CheckpointConfig) -> int:
    """Return the number of positions that a text can have, which may be 0 or less."""
    return config.get_int("max_position_embeddings") - position_offset(config)


def pooling_type(config: CheckpointConfig) -> int | None:
    """Return llama.cpp's number of the pooling that sentence-transformers uses, or None if the
    checkpoint does not say which, or if llama.cpp does not have it.
    """
    if is_classifier(config):
        return RANK
    settings = config.values.get(POOLING_FILE)
    if not isinstance(settings, dict):
        return None
    enabled = [name for name, value in settings.items() if value is True and "_mode_" in name]
    if enabled:
        return POOLING_SETTINGS.get(enabled[0]) if len(enabled) == 1 else None
    return POOLING_MODES.get(str(settings.get("pooling_mode")))


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's bert computes differently; return notes for the
    user.
    """
    activation = config.values.get("hidden_act")
    kind = config.values.get("position_embedding_type", "absolute")
    problems = [
        *encoder_problems(config),
        (activation != "gelu", f"its activation is {activation}"),
        (kind != "absolute", f"its positions are {kind}"),
        (position_count(config) < 1, "it has no positions beside those of padding"),
    ]
    checks.raise_problems(config, problems)
    return pair_notes(config)


def encoder_problems(config: CheckpointConfig) -> list[tuple[object, str]]:
    """Return the problems (see checks.py) of settings that no encoder of llama.cpp supports."""
    count = config.get_int("num_attention_heads")
    return [
        (
            config.get_int("hidden_size") % count,
            f"{count} heads cannot share {config.get_int('hidden_size')} values",
        ),
        (config.get_bool("is_decoder"), "it attends only to earlier positions (is_decoder)"),
        (
            config.values.get(POOLING_FILE) and pooling_type(config) is None,
            f"{POOLING_FILE} combines vectors as llama.cpp cannot",
        ),
        (is_classifier(config) and not labels(config), "its head has no labels"),
    ]


def pair_notes(config: CheckpointConfig) -> list[str]:
    """Return a note if a reranker marks which text of a pair a token belongs to. llama.cpp gives
    all tokens the first type.
    """
    if not is_classifier(config) or config.get_int("type_vocab_size", default=1) < 2:
        return []
    return [
        "llama.cpp does not tell the model which text of a pair a token belongs to "
        "(token types): scores of pairs differ from those of transformers"
    ]


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the metadata keys."""
    return [
        ArchKey("block_count", "uint32", layout.layer_count(config)),
        ArchKey("context_length", "uint32", position_count(config)),
        ArchKey("embedding_length", "uint32", config.get_int("hidden_size")),
        ArchKey("feed_forward_length", "uint32", config.get_int("intermediate_size")),
        ArchKey("attention.head_count", "uint32", config.get_int("num_attention_heads")),
        ArchKey("attention.layer_norm_epsilon", "float32", config.get_float("layer_norm_eps")),
        ArchKey("attention.causal", "bool", False),
        *pooling_keys(config),
        ArchKey(
            "tokenizer.ggml.token_type_count",
            "uint32",
            config.get_int("type_vocab_size", default=1),
        ),
    ]


def pooling_keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the metadata keys of the pooling, if it is known, and of a classifier's labels."""
    pooling = pooling_type(config)
    entries = [] if pooling is None else [ArchKey("pooling_type", "uint32", pooling)]
    if is_classifier(config):
        entries.append(ArchKey("classifier.output_labels", "array:string", labels(config)))
    return entries


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    hidden, ff = config.get_int("hidden_size"), config.get_int("intermediate_size")
    block: Shapes = {
        **_with_bias("attn_q", hidden, hidden),
        **_with_bias("attn_k", hidden, hidden),
        **_with_bias("attn_v", hidden, hidden),
        **_with_bias("attn_output", hidden, hidden),
        **_with_bias("attn_output_norm", hidden),
        **_with_bias("ffn_up", ff, hidden),
        **_with_bias("ffn_down", hidden, ff),
        **_with_bias("layer_output_norm", hidden),
    }
    shapes: Shapes = {
        "token_embd.weight": (config.get_int("vocab_size"), hidden),
        "position_embd.weight": (position_count(config), hidden),
        "token_types.weight": (config.get_int("type_vocab_size"), hidden),
        **_with_bias("token_embd_norm", hidden),
    }
    return shapes | head_shapes(config) | block_tensors.repeat_for_blocks(config, block)


def head_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of a classifier's head: two matrices with a tanh between them."""
    if not is_classifier(config):
        return {}
    hidden = config.get_int("hidden_size")
    return _with_bias("cls", hidden, hidden) | _with_bias("cls.output", len(labels(config)), hidden)


def _with_bias(name: str, *shape: int) -> Shapes:
    """Return the shapes of a weight and of the bias that is added to its result."""
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def prepare(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors under names that the gguf package knows, without the heads for training
    and without the rows of positions that are never used.
    """
    result = block_tensors.rename_tensors(
        tensors, lambda name: _known_name(name, is_classifier(config))
    )
    positions, offset = result.get(POSITIONS_NAME), position_offset(config)
    if positions and offset and len(positions.shape) == 2:
        count = positions.shape[0]
        result[POSITIONS_NAME] = tensor_views.pick_range(positions, min(offset, count), count)
    return result


def _known_name(name: str, has_head: bool) -> str | None:
    """Return the name of a tensor in the gguf package's tables, or None for a tensor of a head for
    training. `has_head`: whether the model has a head that scores a text.
    """
    known = PREFIX.sub("", name)
    for old, new in OLD_ENDINGS.items():
        if known.endswith(old):
            known = known.removesuffix(old) + new
    if has_head:
        # BERT's head is its pooler and one matrix; RoBERTa's has both matrices itself
        known = re.sub(r"^pooler\.dense\.", "classifier.dense.", known)
        known = re.sub(r"^classifier\.(weight|bias)$", r"classifier.out_proj.\1", known)
    return None if known.startswith(UNUSED_PARTS) else known


BERT = Arch(
    name="bert",
    kind="BERT",
    hf=("BertModel", "BertForMaskedLM", "BertForSequenceClassification"),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
    prepare=prepare,
    dropped_endings=("embeddings.position_ids", "embeddings.token_type_ids"),
)
XLM_ROBERTA = replace(
    BERT,
    hf=("XLMRobertaModel", "XLMRobertaForMaskedLM", "XLMRobertaForSequenceClassification"),
    defaults={**DEFAULTS, "pad_token_id": 1, "model_type": "xlm-roberta"},
)

ARCHS = (BERT, XLM_ROBERTA)
