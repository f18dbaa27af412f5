"""Measure matrix products in the layouts of weights that a loaded model can have."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np

from llmcli.runtime.binding.kernels import cpu_graph
from quant.native.ggml import TYPE_NUMBERS, row_bytes

COLUMNS = 2048


def make_product(
    stack: ExitStack, name: str, height: int, rows: int, threads: int, *, own: bool
) -> Callable[[], None]:
    """Return a function that multiplies weights of type `name`, `[height, COLUMNS]`, with `rows` rows
    of inputs. The weights have llmcli's layout if `own`, else the layout that ggml gives them. They
    are freed with the stack.
    """
    blocks = np.full((height, row_bytes(name, COLUMNS)), 1, np.uint8)
    inputs = np.random.default_rng(1).standard_normal((rows, COLUMNS), np.float32)
    graph = stack.enter_context(cpu_graph.open_graph(threads))
    weight = graph.laid_out_weight(TYPE_NUMBERS[name], COLUMNS, blocks, (name,) if own else ())
    graph.output(graph.multiply(weight, graph.values(inputs)))
    return graph.compute


def time_in_turns(tasks: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Return for each task the seconds of `rounds` runs. The tasks take turns, so that a slow phase
    of the machine affects all; a first run of each is not timed.
    """
    seconds: list[list[float]] = [[] for _ in tasks]
    for _ in range(rounds + 1):
        for samples, task in zip(seconds, tasks, strict=True):
            start_time = time.perf_counter()
            task()
            samples.append(time.perf_counter() - start_time)
    return [samples[1:] for samples in seconds]
