"""The share of the memory bandwidth that a generation test used. The bandwidth is measured once per
machine.

A step reads the weights once and the KV cache of every sequence, in the middle of the generation.
"""

from contextlib import suppress

from llmcli.bench.cost import memory_bandwidth
from llmcli.bench.cost.token_cost import work
from llmcli.bench.history.history import History
from llmcli.bench.speed.measure import Result, average
from llmcli.errors import UserError
from llmcli.hardware import host
from llmcli.runtime.binding import devices
from llmcli.types import Watcher
from quant.model_file.model_header import ModelHeader

ROUNDS, SECONDS = 3, 0.04  # about half a second, once per machine
STEADY = 0.85  # ratio of the slowest to the fastest round of a steady measurement


def known(history: History, watcher: Watcher, *, again: bool = False) -> float | None:
    """Return the memory bandwidth in bytes per second, saved or measured now. Returns None if it is
    unknown.

    A measurement whose rounds disagree is used but not saved, because other programs used the
    machine. `remeasure`: ignore the saved value.
    """
    machine = host.identity()
    try:
        saved = None if again else history.bandwidth(machine)
    except UserError:  # saving the results reports the reason
        saved = None
    if saved is not None:
        return saved[0]
    cache = host.last_cache()
    sizes = memory_bandwidth.sizes(cache, host.available_memory())
    uncached = (
        [] if cache is None else [size for size in sizes if size >= memory_bandwidth.BEYOND * cache]
    )
    rate, steady = None, True
    if uncached:
        with watcher.bar("read memory", 1, "tests") as bar:
            reading = memory_bandwidth.measure(min(uncached), host.cores(), ROUNDS, SECONDS)
            bar.advance(1)
        rate, steady = reading.best, min(reading.rates) >= STEADY * reading.best
    if steady:
        with suppress(UserError):
            history.keep_bandwidth(machine, rate)
    return rate


def reached(header: ModelHeader, result: Result, roof: float | None) -> float | None:
    """Return the share of the bandwidth `roof` (bytes per second) that a generation test used.

    Returns None for prompts, which arithmetic limits, and if the bandwidth, the KV cache or the
    chosen experts are unknown, or a GPU computed.
    """
    test = result.test
    if roof is None or test.n_prompt or not test.n_gen or _on_gpu(test.n_gpu_layers):
        return None
    cost = work(header, test.n_depth + test.n_gen // 2, test.type_k, test.type_v)
    if cost.kv is None or (cost.chosen and test.n_parallel > 1):
        return None
    steps = average(result.samples_ts) / test.n_parallel
    return steps * (sum(cost.weights.values()) + test.n_parallel * cost.kv) / roof


def _on_gpu(layers: int) -> bool:
    return layers != 0 and any(
        device.kind in devices.GPU_KINDS for device in devices.list_devices()
    )
