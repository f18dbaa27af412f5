"""The speed at which this CPU multiplies weights of each type with one token, when they are read from
memory: with llmcli's products and with ggml's, and with one thread.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from llmcli.config import Config
from llmcli.planning.measurements.product_trial import COLUMNS, make_product, types_of_ggml
from llmcli.planning.measurements.turns import time_in_turns
from llmcli.runtime.binding.kernels import products
from quant.native.ggml import row_bytes

MIN_BYTES = 64 << 20  # of the weights that are read; more where the last cache is larger
CACHES = 2  # times the last cache
ROUNDS = 5
ROW_MULTIPLE = 32  # all layouts of ggml take multiples of it


@dataclass(frozen=True, slots=True)
class WeightKernel:
    """The speed of the products of one type of weights with all threads, in bytes of weights per
    second: `own_rate` with llmcli's products (None if they are not available), `ggml_rate` with
    ggml's. `is_own`: llmcli's are used. `single_rate`: that of the used ones with one thread.
    `model_bytes`: the bytes of this type that the measured model has.
    """

    type: str
    bits: float  # per weight
    own_rate: float | None
    ggml_rate: float
    is_own: bool
    single_rate: float
    model_bytes: int

    @property
    def rate(self) -> float:
        """The bytes per second of the products that are used."""
        return self.own_rate if self.own_rate is not None and self.is_own else self.ggml_rate

    def tokens_per_second(self, weights: int) -> float:
        """Return how fast this type would multiply `weights` numbers for each token."""
        return self.rate / (weights * self.bits / 8)


def measure_kernels(
    threads: int,
    cache_bytes: int | None,
    config: Config,
    model_bytes: Mapping[str, int],
    on_type: Callable[[], None],
) -> tuple[WeightKernel, ...]:
    """Measure all types that llmcli's products know, and return them by their bits. `config`: where
    it is saved which types are left to ggml. `model_bytes`: the bytes of each type in a model.
    `on_type` is called after each type.
    """
    nbytes = max(MIN_BYTES, CACHES * (cache_bytes or 0))
    left_to_ggml = types_of_ggml(products.TYPES, threads, config)
    found = []
    for name in products.TYPES:
        is_own = products.is_available() and name not in left_to_ggml
        found.append(_measure(name, threads, nbytes, is_own, model_bytes.get(name, 0)))
        on_type()
    return tuple(sorted(found, key=lambda kernel: kernel.bits))


def _measure(name: str, threads: int, nbytes: int, is_own: bool, model_bytes: int) -> WeightKernel:
    per_row = row_bytes(name, COLUMNS)
    height = nbytes // per_row // ROW_MULTIPLE * ROW_MULTIPLE
    # whose products, and with how many threads
    cases = [(False, threads), (is_own, 1)]
    cases += [(True, threads)] if products.is_available() else []
    with ExitStack() as stack:
        tasks = [make_product(stack, name, height, 1, count, own=own) for own, count in cases]
        ggml_rate, single_rate, *own_rates = (
            height * per_row / min(samples) for samples in time_in_turns(tasks, ROUNDS)
        )
    return WeightKernel(
        name,
        8 * per_row / COLUMNS,
        own_rates[0] if own_rates else None,
        ggml_rate,
        is_own,
        single_rate,
        model_bytes,
    )
