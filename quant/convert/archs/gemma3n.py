"""Gemma 3n, text only: four parallel streams of hidden values (AltUp), a low-rank residual beside
attention (Laurel), and an embedding of the token for each layer.

Follows conversion/gemma.py and src/models/gemma3n.cpp of llama.cpp. llama.cpp ignores most of the
settings: layers from the 20th on reuse keys and values, the first 10 layers keep 5 % of their
activations, and logits are capped at 30. Other settings are refused.

llama.cpp loads keys and values of layers that reuse those of earlier layers, although it does not
use them, and transformers 5 does not save them. They are written as zeros if they are missing, where
llama.cpp's converter writes a file that cannot be loaded. The embeddings for each layer get rows
of zeros for tokens of images and sounds, as in llama.cpp's converter.
"""

import re
from dataclasses import replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from quant.checkpoint import tensor_views
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import FLOAT_DTYPES, LazyTensor, Tensors
from quant.convert.archs import gemma3, gemma4
from quant.convert.parts import block_tensors, checks, layout, metadata
from quant.convert.parts.base import Arch, ArchKey, Shapes

if TYPE_CHECKING:
    from quant.native.ggml import U8

# What llama.cpp computes with, whatever the metadata say (src/llama-hparams.h, src/models/models.h).
LAYERS_WITH_KEYS = 20
SPARSE_LAYERS = 10
SPARSITY = 0.95
LOGIT_CAP = 30.0
STREAMS = 4
FIXED_SETTINGS = {
    "altup_num_inputs": STREAMS,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "laurel_rank": 64,
    "hidden_size_per_layer_input": 256,
    "final_logit_softcapping": LOGIT_CAP,
}
PERIOD_LAYERS = 5  # the last layer of each period attends to all positions
DEFAULTS: dict[str, Any] = {  # defaults of transformers' Gemma3nTextConfig
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "num_kv_shared_layers": 15,
    **FIXED_SETTINGS,
}
STREAM_NAME = re.compile(r"(.*altup_(?:unembed_)?projections)\.(\d)\.weight")


def feed_forward_width(config: CheckpointConfig) -> int:
    """Return the width of the feed-forward. config.json may have a list with the same number for
    each layer; of a list with different numbers, return 0.
    """
    widths = config.values.get("intermediate_size")
    if not isinstance(widths, list):
        return config.get_int("intermediate_size")
    is_uniform = len(widths) == layout.layer_count(config) and len({str(w) for w in widths}) == 1
    if not is_uniform:
        return 0
    return CheckpointConfig({"intermediate_size": widths[0]}, config.location).get_int(
        "intermediate_size"
    )


def with_width(config: CheckpointConfig) -> CheckpointConfig:
    """Return the config with one number as intermediate_size."""
    width = feed_forward_width(config) or None
    return replace(config, values={**config.values, "intermediate_size": width})


def sparsities(config: CheckpointConfig) -> list[float]:
    """Return the share of activations that each layer sets to zero."""
    values, layers = config.values.get("activation_sparsity_pattern"), layout.layer_count(config)
    if isinstance(values, list) and all(type(item) in (int, float) for item in values):
        return [float(item) for item in values]
    count = SPARSE_LAYERS if layers > SPARSE_LAYERS else 0
    return [SPARSITY] * count + [0.0] * (layers - count)


def sliding_layers(config: CheckpointConfig) -> list[bool]:
    """Return a list with one entry for each layer: whether the layer has a sliding window."""
    return layout.sliding_layers(config, PERIOD_LAYERS)


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's gemma3n computes differently. Return no
    notes.
    """
    values, layers = config.values, layout.layer_count(config)
    sliding, first = sliding_layers(config), gemma4.first_shared_layer(config)
    sparse = [SPARSITY] * min(SPARSE_LAYERS, layers) + [0.0] * (layers - SPARSE_LAYERS)
    pattern, vocab = values.get("activation_sparsity_pattern"), config.get_int("vocab_size")
    rope_parameters = values.get("rope_parameters")
    is_unlabeled = bool(rope_parameters) and (
        not isinstance(rope_parameters, dict)
        or not rope_parameters.keys() & {"full_attention", "sliding_attention"}
    )
    checks.raise_problems(
        config,
        [
            *checks.common_problems(
                config,
                rope_types=("default", "linear"),
                activations=("gelu_pytorch_tanh",),
                activation_key="hidden_activation",
            ),
            *gemma4.sharing_problems(config, sliding, first),
            *(
                (values.get(key) != value, f"its {key} is {values.get(key)}, not {value}")
                for key, value in FIXED_SETTINGS.items()
            ),
            (
                first != min(LAYERS_WITH_KEYS, layers),
                f"{first} of {layers} layers have keys and values of their own, not "
                f"{min(LAYERS_WITH_KEYS, layers)}",
            ),
            (
                pattern is not None and not isinstance(pattern, list),
                "its activation_sparsity_pattern is not a list",
            ),
            (
                sparsities(config) != sparse,
                f"its activation_sparsity_pattern is not {SPARSITY} in the first {SPARSE_LAYERS} "
                "layers and 0 in the others",
            ),
            (not feed_forward_width(config), "its layers have different feed-forwards"),
            (not any(sliding), "it has no layer with a sliding window"),
            (values.get("sliding_window") is None, "its sliding_window is null"),
            (
                gemma3.local_rope_settings(config).values["rope_type"] != "default",
                "its sliding layers have scaled positions",
            ),
            (
                is_unlabeled,
                "its rope_parameters do not distinguish global layers from sliding ones",
            ),
            checks.problem_biases(config, "attention_bias"),
            (
                config.get_int("vocab_size_per_layer_input", default=vocab) > vocab,
                "more tokens have embeddings for each layer than there are",
            ),
        ],
    )
    return []


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys, then those of the sliding window, of the streams and of the
    sparse activations.
    """
    widths, sliding = config.values.get("intermediate_size"), sliding_layers(config)
    entries = metadata.common_keys(with_width(config))
    if isinstance(widths, list):
        change = ArchKey("feed_forward_length", "array:int32", widths)
        entries = [change if key.name == change.name else key for key in entries]
    local = gemma3.local_rope_settings(config)
    shared_layers = layout.layer_count(config) - gemma4.first_shared_layer(config)
    scales = [
        NormalDist().inv_cdf(share) if 0 < share < 1 else float("-inf")
        for share in sparsities(config)
    ]
    return [
        *entries,
        ArchKey("rope.freq_base_swa", "float32", local.get_float("rope_theta")),
        ArchKey("attention.sliding_window", "uint32", config.get_int("sliding_window")),
        ArchKey("attention.sliding_window_pattern", "array:bool", sliding),
        ArchKey("attention.shared_kv_layers", "uint32", shared_layers),
        ArchKey("altup.active_idx", "uint32", 0),
        ArchKey("altup.num_inputs", "uint32", STREAMS),
        ArchKey(
            "embedding_length_per_layer_input",
            "uint32",
            config.get_int("hidden_size_per_layer_input"),
        ),
        ArchKey("activation_sparsity_scale", "array:float32", scales),
        ArchKey("final_logit_softcapping", "float32", LOGIT_CAP),
    ]


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    config = with_width(config)
    hidden, vocab = config.get_int("hidden_size"), config.get_int("vocab_size")
    rank, width = config.get_int("laurel_rank"), config.get_int("hidden_size_per_layer_input")
    layers = layout.layer_count(config)
    streams: Shapes = {
        "altup_correct_coef.weight": (STREAMS, STREAMS),
        "altup_correct_scale.weight": (hidden,),
        "altup_predict_coef.weight": (STREAMS * STREAMS, STREAMS),
        "altup_router.weight": (STREAMS, hidden),
        "altup_router_norm.weight": (hidden,),
        "laurel_l.weight": (rank, hidden),
        "laurel_r.weight": (hidden, rank),
        "laurel_post_norm.weight": (hidden,),
        "inp_gate.weight": (width, hidden),
        "proj.weight": (hidden, width),
        "post_norm.weight": (hidden,),
    }
    return (
        block_tensors.embedding_and_head(config)
        | block_tensors.repeat_for_blocks(
            config,
            block_tensors.attention_shapes(config),
            block_tensors.head_norm_shapes(config),
            block_tensors.feed_forward_shapes(config),
            block_tensors.post_norm_shapes(config),
            streams,
        )
        | {
            "altup_proj.weight": (STREAMS - 1, hidden, hidden),
            "altup_unembd_proj.weight": (STREAMS - 1, hidden, hidden),
            "per_layer_token_embd.weight": (vocab, layers * width),
            "per_layer_model_proj.weight": (layers * width, hidden),
            "per_layer_proj_norm.weight": (width,),
        }
    )


def prepare(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with the projections of the streams stacked, with embeddings for each
    layer of all tokens, and with zeros for keys and values that are missing and unused.
    """
    streams: dict[str, Tensors] = {}
    result: Tensors = {}
    for name, tensor in tensors.items():
        if match := STREAM_NAME.fullmatch(name):
            streams.setdefault(f"{match[1]}.weight", {})[name] = tensor
        else:
            result[name] = tensor
    for name, pieces in streams.items():
        is_complete = len(pieces) == STREAMS - 1 and len({p.shape for p in pieces.values()}) == 1
        result |= (
            {name: tensor_views.stack(name, [pieces[piece] for piece in sorted(pieces)])}
            if is_complete
            else pieces
        )
    size = config.get_int("vocab_size")
    for name, tensor in tensors.items():
        if name.endswith("embed_tokens_per_layer.weight") and len(tensor.shape) == 2:
            missing = size - tensor.shape[0]
            if missing > 0:
                padding = make_zeros(tensor, name, (missing, tensor.shape[1]))
                result[name] = tensor_views.concatenate(name, [tensor, padding])
    return result | _unused_tensors(config, tensors)


def _unused_tensors(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return zeros for the keys and values that the checkpoint does not contain because they are
    unused.
    """
    hidden, (_, kv_heads, head_dim) = config.get_int("hidden_size"), layout.head_counts(config)
    template = next((item for name, item in tensors.items() if "self_attn.q_proj" in name), None)
    result: Tensors = {}
    if template is None:
        return result
    for layer in range(gemma4.first_shared_layer(config), layout.layer_count(config)):
        for role, shape in (
            ("k_proj", (kv_heads * head_dim, hidden)),
            ("v_proj", (kv_heads * head_dim, hidden)),
            ("k_norm", (head_dim,)),
        ):
            name = f"model.layers.{layer}.self_attn.{role}.weight"
            if name not in tensors:
                result[name] = make_zeros(template, name, shape)
    return result


def make_zeros(template: LazyTensor, name: str, shape: tuple[int, ...]) -> LazyTensor:
    """Return a tensor of zeros. It has the dtype of `template` if this is a float dtype, else
    F32.
    """
    sizes = {"F32": 4, "F16": 2, "BF16": 2}
    dtype = template.dtype if template.dtype in FLOAT_DTYPES and template.dtype in sizes else "F32"

    def read(first: int, last: int) -> "U8":
        import numpy as np

        return np.zeros((last - first, shape[-1] * sizes[dtype]), np.uint8)

    return replace(template, name=name, dtype=dtype, shape=shape, read=read)


GEMMA3N = Arch(
    name="gemma3n",
    kind="GEMMA3N",
    hf=("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
    prepare=prepare,
    names={"altup.correct_output_scale": "altup_correct_scale"},
)

ARCHS = (GEMMA3N,)
