"""Mixtures of experts: one tensor a projection and block, made of experts that stand apart or are
fused.

Checkpoints hold either `…experts.7.up_proj.weight` for every expert, or `…experts.gate_up_proj` and
`…experts.down_proj` for all of them (transformers 5). Follows Qwen2MoeModel.modify_tensors of
llama.cpp (conversion/qwen.py). It knows no family.
"""

import re
from collections import Counter, defaultdict
from dataclasses import replace

from quant import views
from quant.archs.base import Config, Key, Shapes, Tensors
from quant.tensors import FLOATS, LazyTensor

MAX_EXPERTS = 1024  # llama.cpp, LLAMA_MAX_EXPERTS
ONE = re.compile(r"(.+\.experts)\.(\d{1,4})\.(\w+\.(?:weight|bias))")
FUSED = re.compile(r"(.+\.experts)\.gate_up_proj(?:\.weight)?")
DOWN = re.compile(r"(.+\.experts\.down_proj)(?:\.weight)?")


def count(config: Config) -> int:
    """Experts of a block."""
    return config.number("num_local_experts", "num_experts", "n_routed_experts")


def used(config: Config) -> int:
    """Experts that a token goes through."""
    return config.number("num_experts_per_tok")


def problems(config: Config) -> list[tuple[object, str]]:
    """What no mixture of experts can have."""
    return [
        (
            count(config) > MAX_EXPERTS,
            f"it has {count(config)} experts, llama.cpp allows {MAX_EXPERTS}",
        ),
        (used(config) > count(config), f"it uses {used(config)} experts of {count(config)}"),
    ]


def keys(config: Config) -> list[Key]:
    """How many experts there are and how many are used."""
    return [
        Key("expert_count", "uint32", count(config)),
        Key("expert_used_count", "uint32", used(config)),
    ]


def shapes(config: Config, ff: int) -> Shapes:
    """One block's router and stacked experts of width `ff`, by role."""
    hidden, n = config.number("hidden_size"), count(config)
    return {
        "ffn_gate_inp.weight": (n, hidden),
        "ffn_gate_exps.weight": (n, ff, hidden),
        "ffn_up_exps.weight": (n, ff, hidden),
        "ffn_down_exps.weight": (n, hidden, ff),
    }


def gather(config: Config, tensors: Tensors) -> Tensors:
    """Every block's experts as the three tensors that the gguf package names; the rest as it is.

    What is wrong with experts is left for the one error that lists all: a stack that lacks some
    says which, and those that are too many, of another shape, or there in two spellings stay as
    they are, unknown.
    """
    found: Tensors = {}
    fused: Tensors = {}
    apart: dict[str, Tensors] = defaultdict(dict)
    for name, tensor in tensors.items():
        if match := ONE.fullmatch(name):
            apart[f"{match[1]}.{match[3]}"][name] = tensor
        elif FUSED.fullmatch(name) or DOWN.fullmatch(name):
            fused[name] = tensor
        else:
            found[name] = tensor
    pieces = [({name: tensor}, _split(name, tensor)) for name, tensor in fused.items()]
    pieces += [(experts, _stack(name, experts, count(config))) for name, experts in apart.items()]
    for sources, made in pieces:
        found |= sources if made.keys() & found.keys() else made
    return found


def _split(name: str, tensor: LazyTensor) -> Tensors:
    """Fused experts' gate and up [experts, 2 * ff, hidden] as two tensors; what is down gets its
    ending.
    """
    if match := DOWN.fullmatch(name):
        return {f"{match[1]}.weight": tensor}
    if len(tensor.shape) != 3 or tensor.shape[1] % 2:
        return {name: tensor}
    half, block = tensor.shape[1] // 2, name.split(".gate_up_proj")[0]
    return {
        f"{block}.gate_proj.weight": views.part(tensor, 0, half),
        f"{block}.up_proj.weight": views.part(tensor, half, 2 * half),
    }


def _stack(name: str, experts: Tensors, wanted: int) -> Tensors:
    """The experts below `wanted` as one tensor, F32 where they differ in dtype; strangers under
    their own names.
    """
    shape = Counter(tensor.shape for tensor in experts.values()).most_common(1)[0][0]
    mixed = len({tensor.dtype for tensor in experts.values()}) > 1
    fit: dict[int, LazyTensor] = {}
    strangers: Tensors = {}
    for own, tensor in experts.items():
        number = _number(own)
        if (
            number < wanted
            and number not in fit
            and tensor.shape == shape
            and (not mixed or tensor.dtype in FLOATS)
        ):
            fit[number] = views.mapped(tensor, lambda values: values) if mixed else tensor
        else:
            strangers[own] = tensor
    if not fit:
        return strangers
    stack = views.stack(name, [fit[number] for number in sorted(fit)])
    if lost := [str(number) for number in range(wanted) if number not in fit]:
        some = ", ".join(lost[:8]) + (", …" if len(lost) > 8 else "")
        stack = replace(stack, name=f"{name} without expert {some}")
    return {name: stack, **strangers}


def _number(name: str) -> int:
    match = ONE.fullmatch(name)
    assert match
    return int(match[2])
