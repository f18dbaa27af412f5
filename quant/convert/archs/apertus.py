"""Apertus: a norm of each query head and each key head, and a feed-forward of two matrices with the
activation xIELU, whose parameters differ by layer.

Follows ApertusModel of llama.cpp (conversion/llama.py, src/models/apertus.cpp). The parameters of
the activation are tensors in the checkpoint and metadata in the file.
"""

from dataclasses import replace

from quant.checkpoint import tensor_views
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import FLOAT_DTYPES, LazyTensor, Tensors
from quant.convert.parts import block_tensors, checks, layout, metadata, rope
from quant.convert.parts.base import Arch, ArchKey, Shapes
from quant.errors import UserError

DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 12000000.0}  # of transformers' ApertusConfig
DEFAULT_ROPE = {  # rope_parameters of transformers' ApertusConfig
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Parameters of xIELU -> default in transformers (XIELUActivation). None: the checkpoint has them.
PARAMETERS = {"alpha_n": None, "alpha_p": None, "beta": 0.5, "eps": -1e-6}
PARAMETER_ENDINGS = tuple(f".mlp.act_fn.{name}" for name in PARAMETERS)


def normalize(config: CheckpointConfig) -> CheckpointConfig:
    """Return the config with the default rotary settings if config.json has none."""
    if any(config.values.get(name) for name in ("rope_scaling", "rope_parameters")):
        return config
    return replace(config, values={**config.values, "rope_parameters": DEFAULT_ROPE})


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's apertus computes differently. Return
    no notes.
    """
    checks.raise_problems(
        config,
        checks.common_problems(
            config, rope_types=rope.ROPE_TYPES_WITH_FACTORS, activations=("xielu",)
        ),
    )
    return []


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    biases: Shapes = {}
    if config.get_bool("attention_bias"):
        biases = block_tensors.qkv_bias_shapes(config)
        biases["attn_output.bias"] = (config.get_int("hidden_size"),)
    return block_tensors.embedding_and_head(config) | block_tensors.repeat_for_blocks(
        config,
        block_tensors.attention_shapes(config),
        biases,
        block_tensors.head_norm_shapes(config),
        block_tensors.plain_feed_forward_shapes(config),
    )


def tensor_keys(config: CheckpointConfig, tensors: Tensors) -> list[ArchKey]:
    """Return the metadata keys of the activation's parameters, with one number for each layer.

    Raises UserError if a layer has no parameters, or one that is not a single number.
    """
    layers = range(layout.layer_count(config))
    return [
        ArchKey(
            f"xielu.{name}",
            "array:float32",
            [
                _read_parameter(config, f"model.layers.{layer}.mlp.act_fn.{name}", tensors, default)
                for layer in layers
            ],
        )
        for name, default in PARAMETERS.items()
    ]


def _read_parameter(
    config: CheckpointConfig, name: str, tensors: Tensors, default: float | None
) -> float:
    """Return the number in the tensor `name`, or `default` if there is no such tensor."""
    tensor: LazyTensor | None = tensors.get(name)
    if tensor is None and default is not None:
        return default
    if tensor is None or tensor.shape != (1,) or tensor.dtype not in FLOAT_DTYPES:
        raise UserError(
            f"{config.location}: the tensor {name} is missing or not one number",
            hint="fetch the whole model again",
        )
    return float(tensor_views.read_floats(tensor).reshape(-1)[0])


APERTUS = Arch(
    name="apertus",
    kind="APERTUS",
    hf=("ApertusForCausalLM",),
    keys=metadata.common_keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
    normalize=normalize,
    extra_tensors=rope.llama3_rope_factors,
    tensor_keys=tensor_keys,
    needs_head=True,
    dropped_endings=(".rotary_emb.inv_freq", *PARAMETER_ENDINGS),
)

ARCHS = (APERTUS,)
