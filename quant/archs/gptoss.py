"""gpt-oss: a mixture of experts with biases everywhere, attention sinks, and a window on every
other layer.

Follows conversion/gpt_oss.py and src/models/openai-moe.cpp of llama.cpp. The experts come as MXFP4,
and stay it, or as floats with rows and columns exchanged; in both, rows of gate and up alternate.
"""

from collections.abc import Iterator
from dataclasses import replace

from quant import views
from quant.archs import common
from quant.archs.base import Arch, Config, Key, Shapes, Tensors
from quant.tensors import LazyTensor

ALPHA, LIMIT = 1.702, 7.0  # LLM_FFN_SWIGLU_OAI_MOE, src/llama-graph.cpp
DEFAULTS = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "swiglu_limit": LIMIT,
    "swiglu_alpha": ALPHA,
}
PERIOD = 2  # every second layer attends to everything


def check(config: Config) -> list[str]:
    """Refuse what llama.cpp's gpt-oss would not compute alike; returns what the user should know."""
    (experts, used), said = _experts(config), config.values
    silent = not any(isinstance(said.get(key), dict) for key in ("rope_scaling", "rope_parameters"))
    limit, alpha = said["swiglu_limit"], said["swiglu_alpha"]
    common.refuse(
        config,
        [
            *common.problems(config, ropes=("default", "linear", "yarn"), rough=True),
            (silent, "it does not say rope_scaling or rope_parameters"),
            (not config.flag("attention_bias"), "its attention has no biases"),
            (limit != LIMIT, f"its swiglu_limit is {limit}, llama.cpp has {LIMIT}"),
            (alpha != ALPHA, f"its swiglu_alpha is {alpha}, llama.cpp has {ALPHA}"),
            (used > experts, f"it uses {used} of {experts} experts"),
        ],
    )
    return common.rounded(config)


def keys(config: Config) -> list[Key]:
    """The ordinary keys, the window, and the experts."""
    experts, used = _experts(config)
    return [
        *common.keys(config),
        *common.window(config, common.sliding(config, PERIOD), PERIOD),
        Key("expert_count", "uint32", experts),
        Key("expert_used_count", "uint32", used),
        Key("expert_feed_forward_length", "uint32", config.number("intermediate_size")),
    ]


def expected(config: Config) -> Shapes:
    """The tensors that must be there, with their shapes, rows first."""
    hidden, ff, count = (
        config.number("hidden_size"),
        config.number("intermediate_size"),
        common.heads(config)[0],
    )
    experts, _ = _experts(config)
    own: Shapes = {
        "attn_output.bias": (hidden,),
        "attn_sinks.weight": (count,),
        "post_attention_norm.weight": (hidden,),
        "ffn_gate_inp.weight": (experts, hidden),
        "ffn_gate_inp.bias": (experts,),
        "ffn_gate_exps.weight": (experts, ff, hidden),
        "ffn_gate_exps.bias": (experts, ff),
        "ffn_up_exps.weight": (experts, ff, hidden),
        "ffn_up_exps.bias": (experts, ff),
        "ffn_down_exps.weight": (experts, hidden, ff),
        "ffn_down_exps.bias": (experts, hidden),
    }
    return common.ends(config) | common.blocks(
        config, common.attention(config), common.biases(config), own
    )


def prepare(config: Config, tensors: Tensors) -> Tensors:
    """Gate and up apart, experts' rows first, and every name as the gguf package's tables have it."""
    parts = [part for tensor in tensors.values() for part in _parts(tensor)]
    return {part.name: part for part in parts}


def _parts(tensor: LazyTensor) -> Iterator[LazyTensor]:
    """What one tensor of the checkpoint becomes; what is no expert's stays as it is."""
    stem, _, last = tensor.name.rpartition(".")
    if last == "sinks":
        yield replace(tensor, name=f"{tensor.name}.weight")
    elif last == "down_proj_bias":
        yield replace(tensor, name=f"{stem}.down_proj.bias")
    elif last == "gate_up_proj_bias":
        for start, name in enumerate(("gate_proj", "up_proj")):
            yield replace(views.columns(tensor, start, 2), name=f"{stem}.{name}.bias")
    elif last in ("down_proj", "gate_up_proj") and len(tensor.shape) == 3:
        matrices = tensor if tensor.dtype == "MXFP4" else views.transposed(tensor)
        if last == "down_proj":
            yield replace(matrices, name=f"{tensor.name}.weight")
            return
        for start, name in enumerate(("gate_proj", "up_proj")):
            yield replace(
                views.part(matrices, start, matrices.shape[-2], 2), name=f"{stem}.{name}.weight"
            )
    else:
        yield tensor


def _experts(config: Config) -> tuple[int, int]:
    """Experts of a layer, and those that a token goes to."""
    return config.number("num_local_experts"), config.number(
        "num_experts_per_tok", "experts_per_token"
    )


GPT_OSS = Arch(
    name="gpt-oss",
    kind="GPT_OSS",
    hf=("GptOssForCausalLM",),
    keys=keys,
    expected=expected,
    check=check,
    defaults=DEFAULTS,
    needs_head=True,
    prepare=prepare,
)

ARCHS = (GPT_OSS,)
