"""Mixtures of experts: stacks a block's experts into one tensor for each projection.

Checkpoints contain either `...experts.7.up_proj.weight` and the like for each expert, or
`...experts.gate_up_proj` and `...experts.down_proj` for all experts (transformers 5). Follows
Qwen2MoeModel.modify_tensors of llama.cpp (conversion/qwen.py).
"""

import re
from collections import Counter, defaultdict
from dataclasses import replace

from quant.checkpoint import tensor_views
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import FLOAT_DTYPES, LazyTensor, Tensors
from quant.convert.archs.base import ArchKey, Shapes

MAX_EXPERTS = 1024  # llama.cpp, LLAMA_MAX_EXPERTS
EXPERT_NAME = re.compile(r"(.+\.experts)\.(\d{1,4})\.(\w+\.(?:weight|bias))")
FUSED_GATE_UP_NAME = re.compile(r"(.+\.experts)\.gate_up_proj(?:\.weight)?")
FUSED_DOWN_NAME = re.compile(r"(.+\.experts\.down_proj)(?:\.weight)?")


def expert_count(config: CheckpointConfig) -> int:
    """Return the number of experts in a block."""
    return config.get_int("num_local_experts", "num_experts", "n_routed_experts")


def used_expert_count(config: CheckpointConfig) -> int:
    """Return the number of experts that a token is routed to."""
    return config.get_int("num_experts_per_tok")


def expert_problems(config: CheckpointConfig) -> list[tuple[object, str]]:
    """Return (condition, text) pairs for expert counts that llama.cpp does not support."""
    return [
        (
            expert_count(config) > MAX_EXPERTS,
            f"it has {expert_count(config)} experts; llama.cpp allows {MAX_EXPERTS}",
        ),
        (
            used_expert_count(config) > expert_count(config),
            f"it uses {used_expert_count(config)} of {expert_count(config)} experts",
        ),
    ]


def expert_keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the keys for the number of experts and for the number that a token uses."""
    return [
        ArchKey("expert_count", "uint32", expert_count(config)),
        ArchKey("expert_used_count", "uint32", used_expert_count(config)),
    ]


def expert_shapes(config: CheckpointConfig, ff: int) -> Shapes:
    """Return the shapes of one block's router and stacked experts of width `ff`, by role."""
    hidden, n = config.get_int("hidden_size"), expert_count(config)
    return {
        "ffn_gate_inp.weight": (n, hidden),
        "ffn_gate_exps.weight": (n, ff, hidden),
        "ffn_up_exps.weight": (n, ff, hidden),
        "ffn_down_exps.weight": (n, hidden, ff),
    }


def stack_experts(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with every block's experts stacked under the names that the gguf package
    knows.

    Faulty experts raise no error here, because a later error lists all of them as unknown tensors.
    The name of an incomplete stack says which experts are missing. Experts with too high a number
    or another shape, and experts that the checkpoint contains in both forms, keep their names.
    """
    result: Tensors = {}
    fused: Tensors = {}
    single: dict[str, Tensors] = defaultdict(dict)
    for name, tensor in tensors.items():
        if match := EXPERT_NAME.fullmatch(name):
            single[f"{match[1]}.{match[3]}"][name] = tensor
        elif FUSED_GATE_UP_NAME.fullmatch(name) or FUSED_DOWN_NAME.fullmatch(name):
            fused[name] = tensor
        else:
            result[name] = tensor
    pieces = [({name: tensor}, _split(name, tensor)) for name, tensor in fused.items()]
    pieces += [
        (experts, _stack(name, experts, expert_count(config))) for name, experts in single.items()
    ]
    for sources, stacked in pieces:
        result |= sources if stacked.keys() & result.keys() else stacked
    return result


def _split(name: str, tensor: LazyTensor) -> Tensors:
    """Split a tensor of fused gates and ups [experts, 2 * ff, hidden] into two tensors. A fused
    down tensor only gets its complete name.
    """
    if match := FUSED_DOWN_NAME.fullmatch(name):
        return {f"{match[1]}.weight": tensor}
    if len(tensor.shape) != 3 or tensor.shape[1] % 2:
        return {name: tensor}
    half, block = tensor.shape[1] // 2, name.split(".gate_up_proj")[0]
    return {
        f"{block}.gate_proj.weight": tensor_views.pick_range(tensor, 0, half),
        f"{block}.up_proj.weight": tensor_views.pick_range(tensor, half, 2 * half),
    }


def _stack(name: str, experts: Tensors, wanted: int) -> Tensors:
    """Stack the experts 0 .. `wanted` - 1 of one projection into one tensor `name`.

    Experts with other numbers or of another shape than most are not stacked and keep their names.
    If the dtypes differ, the stack is F32. If experts are missing, the tensor's name lists them.
    """
    shape = Counter(tensor.shape for tensor in experts.values()).most_common(1)[0][0]
    mixed = len({tensor.dtype for tensor in experts.values()}) > 1
    fitting: dict[int, LazyTensor] = {}
    unknown: Tensors = {}
    for expert, tensor in experts.items():
        number = _number(expert)
        if (
            number < wanted
            and number not in fitting
            and tensor.shape == shape
            and (not mixed or tensor.dtype in FLOAT_DTYPES)
        ):
            fitting[number] = (
                tensor_views.map_values(tensor, lambda values: values) if mixed else tensor
            )
        else:
            unknown[expert] = tensor
    if not fitting:
        return unknown
    stack = tensor_views.stack(name, [fitting[number] for number in sorted(fitting)])
    if missing := [str(number) for number in range(wanted) if number not in fitting]:
        listed = ", ".join(missing[:8]) + (", …" if len(missing) > 8 else "")
        stack = replace(stack, name=f"{name} without expert {listed}")
    return {name: stack, **unknown}


def _number(name: str) -> int:
    match = EXPERT_NAME.fullmatch(name)
    assert match
    return int(match[2])
