"""What part of this machine's memory bandwidth a generation test used; the figure of `bench`, kept
per machine.

The bytes of a step are those of work.py at the middle of what is generated: the weights once, the
KV of every sequence.
"""

from contextlib import suppress

from llmcli.bench import bandwidth
from llmcli.bench.history import History
from llmcli.bench.kernel import Result, average
from llmcli.bench.work import work
from llmcli.errors import UserError
from llmcli.hardware import host
from llmcli.runtime.binding import devices
from llmcli.types import Watcher
from quant.container import Header

ROUNDS, SECONDS = 3, 0.04  # half a second in all: it is measured once for a machine
STEADY = 0.85  # of the fastest round


def known(history: History, watcher: Watcher, *, again: bool = False) -> float | None:
    """Bytes this machine reads a second: as it was measured once, or is now. None: cannot be known.

    A measurement whose rounds disagree is used and not kept: something else used the machine.
    """
    here = host.identity()
    try:
        kept = None if again else history.bandwidth(here)
    except UserError:  # keeping the results will say why
        kept = None
    if kept is not None:
        return kept[0]
    cache = host.last_cache()
    sizes = bandwidth.sizes(cache, host.available_memory())
    beyond = [] if cache is None else [size for size in sizes if size >= bandwidth.BEYOND * cache]
    rate, steady = None, True
    if beyond:
        with watcher.bar("read memory", 1, "tests") as bar:
            reading = bandwidth.measure(min(beyond), host.cores(), ROUNDS, SECONDS)
            bar.advance(1)
        rate, steady = reading.best, min(reading.rates) >= STEADY * reading.best
    if steady:
        with suppress(UserError):
            history.keep_bandwidth(here, rate)
    return rate


def reached(header: Header, result: Result, roof: float | None) -> float | None:
    """The part of `roof` that a generation used; None for prompts, which are bound by operations,
    and what is unknown: a cache or a GPU that is not, and which experts several sequences choose.
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
    return layers != 0 and any(one.kind in devices.GPUS for one in devices.devices())
