"""Predict how many bytes a model and a context take on each device, without a dry run.

The prediction is a pure function of the header, the placement and the context, and takes less than
a millisecond, so that placements can be searched. It is an upper bound of what llama.cpp's dry run
reports, and the weights and the KV cache are exact. scripts/laboratory/dry_runs.py compares them.

Layers are distributed as in llama_model_base::load_tensors (src/llama-model.cpp).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.planning.prediction.model_layout import ModelLayout
from llmcli.runtime import kv_size
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.placement.model_placement import ModelPlacement
from llmcli.runtime.binding.rows.batch import reserved_outputs

HOST = -1  # in place of a device's index
# Activations of a token that are stored at once: of the widest product inside a layer (gate, up and
# their product), and of the values between layers. Measured by dry runs of 30 models.
FFN_COPIES, WIDTH_COPIES = 3, 6
MASK_BYTES, PLAIN_MASK_BYTES = 2, 4  # per row and cell, with and without flash attention
SCORE_BYTES = 4.2  # per row, cell and head, without flash attention
GRAPH_BYTES = 2 << 20  # other buffers of a graph
# With several devices that have all layers, llama.cpp keeps several copies of a pass's inputs, so
# that the devices compute micro-batches in parallel (GGML_SCHED_MAX_COPIES; src/llama-context.cpp,
# pipeline_parallel).
PIPELINE_COPIES = 4


@dataclass(frozen=True, slots=True)
class PredictedMemory:
    """The bytes on the host or on a device. `cached_weights`: weights on the host that the system
    can read from the file again, so that they need not stay in memory.
    """

    weights: int = 0
    kv: int = 0
    compute: int = 0
    cached_weights: int = 0

    @property
    def total(self) -> int:
        """Return all bytes together."""
        return self.weights + self.kv + self.compute


@dataclass(frozen=True, slots=True)
class LayerDistribution:
    """Where the parts of a model are: for each layer and the output (the last entry) the index of
    its device or HOST, and for each layer whether its experts are on the host.
    """

    places: tuple[int, ...]
    has_host_experts: tuple[bool, ...]


def distribute(
    placement: ModelPlacement, n_layers: int, free_bytes: Sequence[int]
) -> LayerDistribution:
    """Return where llama.cpp puts the parts of a model with `n_layers` layers. `free_bytes`: the free
    memory of each device; empty without devices.
    """
    n_parts = n_layers + 1
    n_moved = n_parts if placement.gpu_layers < 0 else min(placement.gpu_layers, n_parts)
    if not free_bytes:
        n_moved = 0
    first = n_parts - n_moved
    proportions = placement.tensor_split or free_bytes
    bounds = _cumulative_shares(list(proportions)[: len(free_bytes)], len(free_bytes))
    places = [HOST] * first
    for index in range(n_moved):
        share = index / n_moved
        places.append(next((d for d, bound in enumerate(bounds) if bound > share), len(bounds) - 1))
    n_host_experts = placement.cpu_moe_layers
    return LayerDistribution(
        tuple(places),
        tuple(
            places[layer] == HOST or n_host_experts < 0 or layer < n_host_experts
            for layer in range(n_layers)
        ),
    )


def predict_memory(
    layout: ModelLayout,
    cache_bytes: Sequence[int],
    options: ContextOptions,
    distribution: LayerDistribution,
    n_devices: int,
) -> tuple[PredictedMemory, ...]:
    """Return the memory of the host, followed by that of each device. `cache_bytes`: of each layer's
    cache. An empty device takes nothing.
    """
    weights, kv = [0] * (n_devices + 1), [0] * (n_devices + 1)
    weights[HOST] += layout.inputs
    largest_on_host = 0
    for place, pinned in layout.pinned:
        weights[place] += pinned.nbytes
        if place == HOST:
            largest_on_host = max(pinned.largest_dense, pinned.largest_experts)
    for index, layer in enumerate(layout.layers):
        place = distribution.places[index]
        weights[place] += layer.dense
        kv[place if options.offload_kqv else HOST] += cache_bytes[index] if cache_bytes else 0
        on_host = distribution.has_host_experts[index]
        weights[HOST if on_host else place] += layer.experts
        largest_on_host = max(
            largest_on_host,
            layer.largest_experts if on_host else 0,
            layer.largest_dense if place == HOST else 0,
        )
    output_place = distribution.places[-1]
    weights[output_place] += layout.output
    used = {place for place in distribution.places if place != HOST}
    used |= {place for place, _ in layout.pinned if place != HOST}
    is_pipeline = (
        n_devices > 1
        and options.offload_kqv
        and HOST not in distribution.places
        and not any(distribution.has_host_experts)
        and not layout.pinned
    )
    memory = []
    for place in (HOST, *range(n_devices)):
        if place != HOST and place not in used:
            memory.append(PredictedMemory())
            continue
        compute = compute_bytes(
            layout,
            options,
            has_output=place == output_place,
            copies=PIPELINE_COPIES if is_pipeline else 1,
        )
        if place != HOST:
            # products of many rows with weights on the host are computed on the device
            compute += largest_on_host
        else:
            row_values = layout.n_vocab + layout.width * options.outputs_final_states
            compute += 4 * row_values * max(options.n_sequences, options.n_outputs)
        cached = weights[HOST] if place == HOST and layout.is_mapped else 0
        memory.append(PredictedMemory(weights[place], kv[place], compute, cached))
    return tuple(memory)


def compute_bytes(
    layout: ModelLayout, options: ContextOptions, *, has_output: bool = True, copies: int = 1
) -> int:
    """Return an upper bound of the bytes of the buffers for intermediate results on a device.
    `has_output`: whether the device computes logits. `copies`: of the inputs of a pass.
    """
    rows = min(options.n_ubatch, max(options.n_batch, options.n_sequences), options.n_ctx)
    cells = kv_size.round_up_cells(options.n_ctx)
    is_flash = options.flash_attn != "off"
    values = FFN_COPIES * max(layout.ffn_width, layout.query_values) + WIDTH_COPIES * layout.width
    inputs = rows * cells * (MASK_BYTES if is_flash else PLAIN_MASK_BYTES)
    if copies > 1:
        # the values that devices pass on; recurrent layers also pass on those of their states
        passed = 2 * layout.width + (0 if layout.query_values else layout.ffn_width)
        inputs += 4 * rows * passed
    scores = 0 if is_flash else int(rows * cells * layout.query_heads * SCORE_BYTES)
    n_outputs = reserved_outputs(max(options.n_sequences, options.n_outputs))
    logits = 4 * layout.n_vocab * n_outputs if has_output else 0
    return 4 * rows * values + copies * inputs + scores + logits + GRAPH_BYTES


def split_for_counts(counts: Sequence[int]) -> tuple[float, ...]:
    """Return the proportions with which llama.cpp gives each device exactly `counts` layers."""
    # Half a layer less for the first device keeps rounding of the shares away from their bounds.
    last = max((index for index, count in enumerate(counts) if count), default=0)
    shares = [float(count) for count in counts]
    if len([count for count in counts if count]) > 1:
        shares[next(index for index, count in enumerate(counts) if count)] -= 0.5
        shares[last] += 0.5
    return tuple(shares)


def _cumulative_shares(proportions: Sequence[float], count: int) -> list[float]:
    """Return for each of `count` devices the share of the layers that are before its end."""
    values = [*proportions, *[0.0] * (count - len(proportions))]
    total = sum(values)
    if not total:
        return [1.0] * count
    shares, running = [], 0.0
    for value in values:
        running += value
        shares.append(running / total)
    return shares
