"""The share of the machine's memory bandwidth that a generation test uses. The bandwidth is
measured once per machine and saved.

Each generation step reads the weights once, and the KV cache of every sequence. The KV cache is
counted with its size in the middle of the generation.
"""

from contextlib import suppress

from llmcli.bench.cost import memory_bandwidth
from llmcli.bench.cost.token_cost import token_cost
from llmcli.bench.history.history import History
from llmcli.bench.speed.measure import SpeedResult, average
from llmcli.errors import UserError
from llmcli.hardware import host
from llmcli.runtime.binding.placement import devices
from llmcli.types import ProgressDisplay
from quant.model_file.model_header import ModelHeader

ROUNDS, ROUND_SECONDS = 3, 0.04  # these take about half a second, once per machine
# the rounds of a measurement agree if the slowest reaches this fraction of the fastest round's rate
STEADY_RATIO = 0.85


def machine_bandwidth(
    history: History, watcher: ProgressDisplay, *, remeasure: bool = False
) -> float | None:
    """Return the memory bandwidth in bytes per second. It is read from the history, or measured and
    saved if it is missing. Returns None if it cannot be measured.

    A measurement whose rounds differ too much, because other programs use the machine, is returned
    but not saved. `remeasure`: ignore a saved value.
    """
    machine = host.machine_identity()
    try:
        saved = None if remeasure else history.bandwidth(machine)
    except UserError:  # ignored, because saving the results will report the reason
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
    """Return the fraction of `bandwidth` (bytes per second) that a generation test used.

    Returns None for prompts, whose limit is arithmetic, and for tests on a GPU. Also returns None
    if the bandwidth, the size of the KV cache or the choice of experts is unknown.
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
