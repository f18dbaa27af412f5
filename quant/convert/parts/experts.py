"""Mixtures of experts: stacks the experts of a block into one tensor for each projection (gate, up,
down).

A checkpoint contains either one tensor for each expert, such as `...experts.7.up_proj.weight`, or
fused tensors for all experts, `...experts.gate_up_proj` and `...experts.down_proj` (transformers
5). Follows Qwen2MoeModel.modify_tensors of llama.cpp (conversion/qwen.py).
"""

import re
from collections import Counter, defaultdict
from dataclasses import replace

from quant.checkpoint import tensor_views
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import FLOAT_DTYPES, LazyTensor, Tensors
from quant.convert.parts import block_tensors
from quant.convert.parts.base import ArchKey, Shapes

MAX_EXPERTS = 1024  # llama.cpp, LLAMA_MAX_EXPERTS
SOFTMAX, SIGMOID = 1, 2  # llama_expert_gating_func_type
EXPERT_NAME = re.compile(r"(.+\.experts)\.(\d{1,4})\.(\w+\.(?:weight|bias))")
FUSED_GATE_UP_NAME = re.compile(r"(.+\.experts)\.gate_up_proj(?:\.weight)?")
FUSED_DOWN_NAME = re.compile(r"(.+\.experts\.down_proj)(?:\.weight)?")


def expert_count(config: CheckpointConfig) -> int:
    """Return the number of experts in a block."""
    return config.get_int("num_local_experts", "num_experts", "n_routed_experts")


def used_expert_count(config: CheckpointConfig) -> int:
    """Return the number of experts to which each token is routed."""
    return config.get_int("num_experts_per_tok")


def expert_problems(config: CheckpointConfig) -> list[tuple[object, str]]:
    """Return the problems (see checks.py) of expert counts that llama.cpp does not support."""
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
    """Return the metadata keys for the number of experts, and for the number of experts that a
    token uses.
    """
    return [
        ArchKey("expert_count", "uint32", expert_count(config)),
        ArchKey("expert_used_count", "uint32", used_expert_count(config)),
    ]


def expert_shapes(config: CheckpointConfig, ff: int) -> Shapes:
    """Return the shapes of one block's router and stacked experts, by role. The feed-forward of an
    expert has the width `ff`.
    """
    hidden, n = config.get_int("hidden_size"), expert_count(config)
    return {
        "ffn_gate_inp.weight": (n, hidden),
        "ffn_gate_exps.weight": (n, ff, hidden),
        "ffn_up_exps.weight": (n, ff, hidden),
        "ffn_down_exps.weight": (n, hidden, ff),
    }


def sparse_feed_forward_shapes(config: CheckpointConfig, ff: int) -> Shapes:
    """Return the shapes of one block's router, stacked experts and the norm before them, by role.
    The feed-forward of an expert has the width `ff`.
    """
    return {"ffn_norm.weight": (config.get_int("hidden_size"),), **expert_shapes(config, ff)}


def shared_expert_shapes(config: CheckpointConfig, ff: int) -> Shapes:
    """Return the shapes of one block's shared experts, which all tokens use, by role. All of them
    together have the width `ff`.
    """
    hidden = config.get_int("hidden_size")
    return {
        "ffn_gate_shexp.weight": (ff, hidden),
        "ffn_up_shexp.weight": (ff, hidden),
        "ffn_down_shexp.weight": (hidden, ff),
    }


def stack_experts_and_name_biases(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with the experts of each block stacked (see stack_experts), and with the
    biases that correct the router's scores under names that the gguf package knows.
    """
    return block_tensors.rename_tensors(
        stack_experts(config, tensors),
        lambda name: name.replace("e_score_correction_bias", "e_score_correction.bias"),
    )


def stack_experts(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with the experts of each block stacked, under names that the gguf package
    knows.

    Faulty experts raise no error here. They get names under which the converter later reports them
    together as unknown tensors: the name of an incomplete stack lists the missing experts. Experts
    with too high a number or a different shape, and experts that the checkpoint contains in both
    forms, keep their own names.
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
    pieces = [({name: tensor}, _split_fused(name, tensor)) for name, tensor in fused.items()]
    pieces += [
        (experts, _stack(name, experts, expert_count(config))) for name, experts in single.items()
    ]
    for sources, stacked in pieces:
        result |= sources if stacked.keys() & result.keys() else stacked
    return result


def stack_gate_up(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with separate experts stacked, and the gates and ups of all experts of a
    layer in one tensor `[experts, 2 * ff, hidden]`. Experts that are stored so already stay
    unchanged.
    """
    separate = {name: item for name, item in tensors.items() if EXPERT_NAME.fullmatch(name)}
    joined = dict(separate)
    for name, gate in separate.items():
        up_name = name.replace(".gate_proj.", ".up_proj.")
        up = separate.get(up_name)
        if up_name == name or up is None or up.shape != gate.shape:
            continue
        label = name.replace(".gate_proj.", ".gate_up_proj.")
        joined[label] = tensor_views.concatenate(label, [gate, up])
        del joined[name], joined[up_name]
    others = {name: item for name, item in tensors.items() if name not in separate}
    return others | stack_experts(config, joined)


def _split_fused(name: str, tensor: LazyTensor) -> Tensors:
    """Split a fused tensor of all gates and ups [experts, 2 * ff, hidden] into two tensors. A
    tensor of all downs is not split and only gets its full name. A tensor of another shape keeps
    its name.
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


def _stack(name: str, experts: Tensors, count: int) -> Tensors:
    """Stack experts 0 .. `count` - 1 of one projection into one tensor called `name`. `experts` are
    their tensors by checkpoint name.

    Experts with other numbers, or with a different shape than most, are not stacked and keep their
    names. If the dtypes differ, the stack is F32. If experts are missing, the tensor's own name
    lists them.
    """
    shape = Counter(tensor.shape for tensor in experts.values()).most_common(1)[0][0]
    mixed = len({tensor.dtype for tensor in experts.values()}) > 1
    fitting: dict[int, LazyTensor] = {}
    unknown: Tensors = {}
    for expert, tensor in experts.items():
        number = _expert_number(expert)
        if (
            number < count
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
    if missing := [str(number) for number in range(count) if number not in fitting]:
        listed = ", ".join(missing[:8]) + (", …" if len(missing) > 8 else "")
        stack = replace(stack, name=f"{name} without expert {listed}")
    return {name: stack, **unknown}


def _expert_number(name: str) -> int:
    """Return the number of an expert in the name of its tensor."""
    match = EXPERT_NAME.fullmatch(name)
    assert match
    return int(match[2])
