"""The speed at which this CPU multiplies weights of each type with one token, when they are read from
memory: with llmcli's products and with ggml's, and with one thread.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from llmcli.planning.measurements.product_trial import MAX_GGML_RATIO
from llmcli.runtime.binding.kernels import products
from llmcli.runtime.binding.kernels.product_timing import COLUMNS, make_product, time_in_turns
from quant.native.ggml import row_bytes

MIN_BYTES = 64 << 20  # of the weights that are read; more where the last cache is larger
CACHES = 2  # times the last cache
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class WeightKernel:
    """The speed of the products of one type of weights: bytes of weights per second.

    `own_rate`: with llmcli's products; None if they are not available. `single_rate`: with the faster of both
    and one thread. `model_bytes`: the bytes of this type that the measured model has.
    """

    type: str
    bits: float  # per weight
    own_rate: float | None
    ggml_rate: float
    single_rate: float
    model_bytes: int

    @property
    def is_own(self) -> bool:
        """Return whether llmcli's products are used: ggml's must be clearly faster."""
        return self.own_rate is not None and self.own_rate > MAX_GGML_RATIO * self.ggml_rate

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
    model_bytes: Mapping[str, int],
    on_type: Callable[[], None],
) -> tuple[WeightKernel, ...]:
    """Measure all types that llmcli's products know, and return them by their bits. `model_bytes`:
    the bytes of each type in a model. `on_type` is called after each type.
    """
    nbytes = max(MIN_BYTES, CACHES * (cache_bytes or 0))
    found = []
    for name in products.TYPES:
        found.append(_measure(name, threads, nbytes, model_bytes.get(name, 0)))
        on_type()
    return tuple(sorted(found, key=lambda kernel: kernel.bits))


def _measure(name: str, threads: int, nbytes: int, model_bytes: int) -> WeightKernel:
    per_row = row_bytes(name, COLUMNS)
    height = nbytes // per_row // 32 * 32  # all layouts of ggml take multiples of 32 rows
    layouts = (True, False) if products.is_available() else (False,)
    rates = {}
    for count in dict.fromkeys((threads, 1)):
        with ExitStack() as stack:
            tasks = [make_product(stack, name, height, 1, count, own=own) for own in layouts]
            for own, samples in zip(layouts, time_in_turns(tasks, ROUNDS), strict=True):
                rates[count, own] = height * per_row / min(samples)
    return WeightKernel(
        name,
        8 * per_row / COLUMNS,
        rates.get((threads, True)),
        rates[threads, False],
        max(rates[1, own] for own in layouts),
        model_bytes,
    )
