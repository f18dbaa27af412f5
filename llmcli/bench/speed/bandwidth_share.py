"""The share of the memory bandwidth that a generation test used. The bandwidth is measured once per
machine.

A step reads the weights once and the KV cache of every sequence, in the middle of the generation.
"""

from contextlib import suppress

from llmcli.bench.cost import memory_bandwidth
from llmcli.bench.cost.token_cost import token_cost
from llmcli.bench.history.history import History
from llmcli.bench.speed.measure import SpeedResult, average
from llmcli.errors import UserError
from llmcli.hardware import host
from llmcli.runtime.binding import devices
from llmcli.types import ProgressDisplay
from quant.model_file.model_header import ModelHeader

ROUNDS, ROUND_SECONDS = 3, 0.04  # about half a second, once per machine
STEADY_RATIO = 0.85  # ratio of the slowest to the fastest round of a steady measurement


def machine_bandwidth(
    history: History, watcher: ProgressDisplay, *, remeasure: bool = False
) -> float | None:
    """Return the memory bandwidth in bytes per second, saved or measured now. Returns None if it is
    unknown.

    A measurement whose rounds disagree is used but not saved, because other programs used the
    machine. `remeasure`: ignore the saved value.
    """
    machine = host.machine_identity()
    try:
        saved = None if remeasure else history.bandwidth(machine)
    except UserError:  # saving the results reports the reason
        saved = None
    if saved is not None:
        return saved[0]
    cache = host.last_cache_bytes()
    sizes = memory_bandwidth.buffer_sizes(cache, host.available_memory())
    uncached = (
        []
        if cache is None
        else [size for size in sizes if size >= memory_bandwidth.MIN_CACHE_FACTOR * cache]
    )
    rate, steady = None, True
    if uncached:
        with watcher.bar("read memory", 1, "tests") as bar:
            reading = memory_bandwidth.measure_bandwidth(
                min(uncached), host.core_count(), ROUNDS, ROUND_SECONDS
            )
            bar.advance(1)
        rate, steady = (
            reading.best_rate,
            min(reading.round_rates) >= STEADY_RATIO * reading.best_rate,
        )
    if steady:
        with suppress(UserError):
            history.save_bandwidth(machine, rate)
    return rate


def bandwidth_share(
    header: ModelHeader, result: SpeedResult, bandwidth: float | None
) -> float | None:
    """Return the share of the `bandwidth` (bytes per second) that a generation test used.

    Returns None for prompts, which arithmetic limits, and if the bandwidth, the KV cache or the
    chosen experts are unknown, or a GPU computed.
    """
    test = result.test
    if bandwidth is None or test.n_prompt or not test.n_gen or _on_gpu(test.n_gpu_layers):
        return None
    cost = token_cost(header, test.n_depth + test.n_gen // 2, test.type_k, test.type_v)
    if cost.kv_bytes is None or (cost.has_routed_experts and test.n_parallel > 1):
        return None
    steps = average(result.samples_ts) / test.n_parallel
    return steps * (sum(cost.weight_bytes.values()) + test.n_parallel * cost.kv_bytes) / bandwidth


def _on_gpu(layers: int) -> bool:
    return layers != 0 and any(
        device.kind in devices.GPU_KINDS for device in devices.list_devices()
    )
