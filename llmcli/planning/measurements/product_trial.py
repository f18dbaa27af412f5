"""Measure for which types of weights llmcli's own matrix products are faster than ggml's on this CPU,
and save the result.

Weights are multiplied in both layouts, with one row of inputs, as for a generated token, and
with several, as for a prompt. It takes a tenth of a second for a type.
"""

import functools
import hashlib
import json
import statistics
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from llmcli.atomic_files import write_atomically
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.hardware import host
from llmcli.planning.measurements import tuned_profile
from llmcli.runtime.binding.kernels import gemm, product_timing, products
from llmcli.runtime.binding.placement.model_placement import ModelPlacement
from quant.json_dataclasses import decode_value, parse_object, read_file
from quant.model_file.model_header import ModelHeader
from quant.model_file.product_weights import multiplied_weights
from quant.native.ggml import TYPE_NUMBERS, row_bytes

# A type with fewer bytes in a model is not measured: its products take hardly any time.
MIN_BYTES = 32 << 20
HEIGHT = 2048  # rows of the weights
PROMPT_ROWS = 32
# products with one row, and with PROMPT_ROWS rows, of one exchange, as in the objective "chat" of
# bench tune
EXCHANGE_PRODUCTS = 128, 512 // PROMPT_ROWS
ROUNDS = 9
# ggml's products are used only if they take less than this share of the time of llmcli's.
MAX_GGML_RATIO = 0.95
# If the median takes more than this many times the shortest, other programs were busy. Then a result
# is saved only if one takes this many times as long as the other.
MAX_MEDIAN_RATIO, CLEAR_RATIO = 1.3, 1.25
MAX_FILE_BYTES = 1 << 12  # maximum size of the file of a result


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
    """Return the types of a model's weights for which ggml's products are faster. They are measured
    if no result is saved.
    """
    if placement.ggml_products or not placement.repack or not products.is_available():
        return ()
    sizes: dict[str, int] = {}
    for tensor in multiplied_weights(header):
        sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.nbytes
    return tuple(
        sorted(
            name
            for name, nbytes in sizes.items()
            if name in products.TYPES
            and nbytes >= MIN_BYTES
            and _read_or_measure(name, threads, config).is_faster_with_ggml
        )
    )


def cache_path(name: str, threads: int, config: Config) -> Path:
    """Return the path of the file with the result for a type on this machine, with this build of
    llama.cpp and this library of products. The file may not exist.
    """
    key = json.dumps(
        [
            *(name, threads, products.library_name()),
            *(host.machine_identity(), tuned_profile.build_identity()),
        ]
    )
    return config.cache / "products" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _read_or_measure(name: str, threads: int, config: Config) -> ProductTimes:
    """Return the times of a type of weights. They are measured if no result is saved."""
    path = cache_path(name, threads, config)
    times = _read_times(path)
    if times is None:
        times, is_steady = measure_products(name, threads)
        if is_steady or times.is_clear:
            # if the result cannot be saved, the next run measures again
            with suppress(UserError):
                write_atomically(
                    path, (json.dumps({"version": 1, **asdict(times)}) + "\n").encode()
                )
    return times


def _read_times(path: Path) -> ProductTimes | None:
    """Return the result that is saved in a file, or None if the file is missing or invalid."""
    try:
        stored = parse_object(read_file(path, MAX_FILE_BYTES), MAX_FILE_BYTES)
        times: ProductTimes = decode_value(ProductTimes, stored, "")
    except (OSError, ValueError):
        return None
    return times if stored.get("version") == 1 else None


def measure_products(name: str, threads: int) -> tuple[ProductTimes, bool]:
    """Measure both products of a type of weights. Return their times, and whether they are steady."""
    with ExitStack() as stack:
        tasks: list[Callable[[], object]] = [
            product_timing.make_product(stack, name, HEIGHT, rows, threads, own=own)
            for own in (True, False)
            for rows in (1, PROMPT_ROWS)
        ]
        in_bfloat16 = _bfloat16_product(name, threads)
        if in_bfloat16() is not None:  # these products would take large prompts
            tasks.append(in_bfloat16)
        seconds = product_timing.time_in_turns(tasks, ROUNDS)
    own_token, own_prompt, ggml_token, *ggml_prompts = (min(samples) for samples in seconds)
    is_steady = all(
        statistics.median(samples) < MAX_MEDIAN_RATIO * min(samples) for samples in seconds
    )
    tokens, prompts = EXCHANGE_PRODUCTS
    return ProductTimes(
        tokens * own_token + prompts * own_prompt,
        tokens * ggml_token + prompts * min(ggml_prompts),
    ), is_steady


def _bfloat16_product(name: str, threads: int) -> Callable[[], object]:
    """Return a function that multiplies weights with the inputs of a prompt in bfloat16, or returns
    None where there is no such product.
    """
    blocks = np.full((HEIGHT, row_bytes(name, product_timing.COLUMNS)), 1, np.uint8)
    inputs = np.ones((PROMPT_ROWS, product_timing.COLUMNS), np.float32)
    return functools.partial(gemm.multiply, TYPE_NUMBERS[name], blocks, inputs, threads)
