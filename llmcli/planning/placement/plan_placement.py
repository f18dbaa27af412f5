"""Plan where the layers of a model go: from the options of a run and a machine to a placement.

What the user has typed is kept; the search chooses the rest (placement_search.py).
"""

import functools
import re
from dataclasses import replace

from llmcli.errors import UserError
from llmcli.planning.machine import Machine
from llmcli.planning.placement.placement_search import (
    PlacementRequest,
    PlacementSearch,
    PlannedPlacement,
)
from llmcli.planning.placement.tensor_patterns import find_place
from llmcli.planning.placement.used_devices import use_devices
from llmcli.planning.prediction.cache_layout import cache_bytes_by_layer
from llmcli.planning.prediction.model_layout import ModelLayout, read_layout
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.placement.model_placement import HOST_BUFFER, ON_HOST
from llmcli.runtime.requests.placement_options import PlacementOptions
from llmcli.runtime.requests.request import RunOptions
from quant.model_file.model_header import ModelHeader


def plan_placement(
    header: ModelHeader, options: RunOptions, machine: Machine, default_size: int, slots: int = 1
) -> PlannedPlacement:
    """Return the placement and the context that suit a machine. `default_size`: the longest context
    to choose if the user has set none. Raises UserError for a value of -ngl that is not a number,
    auto or all.
    """
    search, request = build_search(header, options, machine, default_size, slots)
    planned = search.choose(request)
    placement = options.apply_to(planned.placement)
    # --reproducible leaves products of many rows to ggml, but llmcli's do not depend on other rows
    has_ggml_products = options.gemm == "ggml" and not options.reproducible
    return replace(planned, placement=replace(placement, ggml_products=has_ggml_products))


def build_search(
    header: ModelHeader, options: RunOptions, machine: Machine, default_size: int, slots: int = 1
) -> tuple[PlacementSearch, PlacementRequest]:
    """Return the search of `plan_placement`, and what it is asked for."""
    layers = parse_layers(options.gpu_layers)
    machine = planned_machine(options, machine)
    context = ContextOptions(
        default_size,
        options.batch_size,
        options.ubatch_size,
        slots,
        type_k=options.cache_type_k,
        type_v=options.cache_type_v,
        flash_attn=options.flash_attn,
        n_outputs=slots,
        offload_kqv=options.kv_offload,
        swa_full=options.reproducible,
    )
    request = PlacementRequest(
        default_size,
        layers if machine.devices else 0,
        parse_expert_layers(options.cpu_moe),
        options.tensor_split,
        options.ctx_size,
        bool(options.devices or options.tensor_split or options.split_mode != "layer"),
    )
    search = PlacementSearch(
        placed_layout(header, options, machine),
        machine,
        context,
        functools.cache(lambda each: cache_bytes_by_layer(header, each) or ()),
    )
    return search, request


def planned_machine(options: RunOptions, machine: Machine) -> Machine:
    """Return the machine with only the devices that a run uses, in the order in which llama.cpp
    puts layers on them. Raises UserError for a device that is not there.
    """
    is_offloaded = any(entry.buffer != HOST_BUFFER for entry in options.tensor_overrides)
    if parse_layers(options.gpu_layers) == 0 and not is_offloaded:
        return machine.without_devices()
    return use_devices(machine, options)


def placed_layout(header: ModelHeader, options: PlacementOptions, machine: Machine) -> ModelLayout:
    """Return the layout of a model with the places of --override-tensor. `machine`: that of
    `planned_machine`.
    """
    names = [device.name for device in machine.devices]
    layout = read_layout(header, find_place(options.tensor_overrides, names))
    return replace(layout, is_mapped=options.apply_to(ON_HOST).maps_file)


def parse_layers(value: str) -> int | None:
    """Return the number of layers that a value of -ngl asks for; -1: all; None: auto. Raises
    UserError for anything else.
    """
    requested = value.strip().lower()
    if requested in ("auto", "all"):
        return None if requested == "auto" else -1
    if not re.fullmatch(r"-?[0-9]{1,6}", requested):
        raise UserError(
            f"--gpu-layers is {value!r}", hint="-ngl takes a number of layers, auto or all"
        )
    return int(requested)


def parse_expert_layers(value: str) -> int | None:
    """Return the number of layers that a value of --n-cpu-moe asks for; -1: all; None: auto. Raises
    UserError for anything else.
    """
    requested = value.strip().lower()
    if requested in ("auto", "all"):
        return None if requested == "auto" else -1
    if not re.fullmatch(r"[0-9]{1,6}", requested):
        raise UserError(
            f"--n-cpu-moe is {value!r}", hint="--n-cpu-moe takes a number of layers, auto or all"
        )
    return int(requested)
