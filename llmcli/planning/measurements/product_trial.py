"""Measure for which types of weights llmcli's own matrix products are faster than ggml's on this CPU,
and save the result.

Weights are multiplied in both layouts, with one row of inputs, as for a generated token, and with
several, as for a prompt. It takes a tenth of a second for a type.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.hardware import host
from llmcli.planning.measurements import tuned_profile
from llmcli.planning.measurements.saved_result import read_or_measure, result_path
from llmcli.planning.measurements.turns import are_steady, time_in_turns
from llmcli.runtime.binding.kernels import cpu_graph, gemm, products
from llmcli.runtime.binding.placement import devices
from llmcli.runtime.binding.placement.model_placement import ModelPlacement
from quant.model_file.model_header import ModelHeader
from quant.model_file.product_weights import multiplied_weights
from quant.native.ggml import TYPE_NUMBERS, row_bytes

# A type with fewer bytes in a model is not measured: its products take hardly any time.
MIN_BYTES = 32 << 20
HEIGHT, COLUMNS = 2048, 2048  # of the weights
PROMPT_ROWS = 32
# products with one row, and with PROMPT_ROWS rows, of one exchange, as in the objective "chat" of
# bench tune
EXCHANGE_PRODUCTS = 128, 512 // PROMPT_ROWS
ROUNDS = 9
# ggml's products are used only if they take less than this share of the time of llmcli's.
MAX_GGML_RATIO = 0.95
# A result that is not steady is saved only if one takes this many times as long as the other.
CLEAR_RATIO = 1.25


@dataclass(frozen=True, slots=True)
class ProductTimes:
    """The seconds that the products of one exchange take: a prompt and its answer."""

    own_seconds: float
    ggml_seconds: float

    @property
    def is_clear(self) -> bool:
        """Return whether one is so much faster that other programs cannot be the reason."""
        times = (self.own_seconds, self.ggml_seconds)
        return max(times) > CLEAR_RATIO * min(times)

    @property
    def is_faster_with_ggml(self) -> bool:
        """Return whether ggml's products are faster, beyond noise."""
        return self.ggml_seconds < MAX_GGML_RATIO * self.own_seconds


def choose_products(
    header: ModelHeader, placement: ModelPlacement, threads: int, config: Config
) -> tuple[str, ...]:
    """Return the types of a model's weights for which ggml's products are faster. With a GPU nothing
    is measured: the processor computes few layers or none.
    """
    if placement.ggml_products or not placement.repack:
        return ()
    if placement.uses_gpu and devices.has_gpu():
        return ()
    sizes = weight_bytes(header)
    return types_of_ggml(
        (name for name, nbytes in sizes.items() if nbytes >= MIN_BYTES), threads, config
    )


def weight_bytes(header: ModelHeader) -> dict[str, int]:
    """Return the bytes of the weights of a model's matrix products, by type."""
    sizes: dict[str, int] = {}
    for tensor in multiplied_weights(header):
        sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.nbytes
    return sizes


def types_of_ggml(names: Iterable[str], threads: int, config: Config) -> tuple[str, ...]:
    """Return those of some types of weights that ggml multiplies faster than llmcli's products. They
    are measured if no result is saved.
    """
    if not products.is_available():
        return ()
    return tuple(
        name
        for name in sorted(set(names) & set(products.TYPES))
        if _is_faster_with_ggml(name, threads, config)
    )


def cache_path(name: str, threads: int, config: Config) -> Path:
    """Return the path of the file with the result for a type on this machine, with this build of
    llama.cpp and this library of products. The file may not exist.
    """
    return result_path(
        config,
        "products",
        *(name, threads, products.library_name()),
        *(host.machine_identity(), tuned_profile.build_identity()),
    )


def _is_faster_with_ggml(name: str, threads: int, config: Config) -> bool:
    """Return whether ggml's products of a type are faster; False if there is no memory to measure
    them. The model may still fit.
    """
    try:
        times = read_or_measure(
            cache_path(name, threads, config),
            ProductTimes,
            lambda: measure_products(name, threads),
        )
    except (UserError, MemoryError):
        return False
    return times.is_faster_with_ggml


def measure_products(name: str, threads: int) -> tuple[ProductTimes, bool]:
    """Measure both products of a type of weights. Return their times, and whether they are worth
    being saved.
    """
    with ExitStack() as stack:
        tasks: list[Callable[[int], object]] = [
            make_product(stack, name, HEIGHT, rows, threads, own=own)
            for own in (True, False)
            for rows in (1, PROMPT_ROWS)
        ]
        in_bfloat16 = _bfloat16_product(name, threads)
        if in_bfloat16(0) is not None:  # these products would take large prompts
            tasks.append(in_bfloat16)
        seconds = time_in_turns(tasks, ROUNDS)
    own_token, own_prompt, ggml_token, *ggml_prompts = (min(samples) for samples in seconds)
    tokens, prompts = EXCHANGE_PRODUCTS
    times = ProductTimes(
        tokens * own_token + prompts * own_prompt,
        tokens * ggml_token + prompts * min(ggml_prompts),
    )
    return times, times.is_clear or are_steady(seconds)


def make_product(
    stack: ExitStack, name: str, height: int, rows: int, threads: int, *, own: bool
) -> Callable[[int], None]:
    """Return a task that multiplies weights of type `name`, `[height, COLUMNS]`, with `rows` rows of
    inputs. The weights have llmcli's layout if `own`, else the layout that ggml gives them. They are
    freed with the stack.
    """
    blocks = np.full((height, row_bytes(name, COLUMNS)), 1, np.uint8)
    inputs = np.random.default_rng(1).standard_normal((rows, COLUMNS), np.float32)
    graph = stack.enter_context(cpu_graph.open_graph(threads))
    weight = graph.laid_out_weight(TYPE_NUMBERS[name], COLUMNS, blocks, (name,) if own else ())
    graph.output(graph.multiply(weight, graph.values(inputs)))
    return lambda number: graph.compute()


def _bfloat16_product(name: str, threads: int) -> Callable[[int], object]:
    """Return a task that multiplies weights with the inputs of a prompt in bfloat16. It returns None
    where there is no such product.
    """
    blocks = np.full((HEIGHT, row_bytes(name, COLUMNS)), 1, np.uint8)
    inputs = np.ones((PROMPT_ROWS, COLUMNS), np.float32)
    return lambda number: gemm.multiply(TYPE_NUMBERS[name], blocks, inputs, threads)
