"""How close a model's speed on this machine is to the limit set by memory.

The memory bandwidth and the model's prompt and generation speeds are measured, and compared with
the bytes and operations of a token. The arithmetic limit is the best rate that this model's own
prompts reach, not a data sheet's. CPU only: the bandwidth of a GPU is not measured.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmcli.bench.cost import memory_bandwidth
from llmcli.bench.cost.memory_bandwidth import Reading
from llmcli.bench.cost.token_cost import Work, prefill, work
from llmcli.bench.speed import measure as kernel
from llmcli.bench.speed.parameter_grid import Test
from llmcli.hardware import host
from llmcli.reading_speed import pace
from llmcli.runtime.binding.model import Model
from quant.model_file.model_header import ModelHeader

PROMPT, UBATCHES, GENERATED = 512, (128, 512), 32  # tokens


@dataclass(frozen=True, slots=True)
class Machine:
    """The measured memory bandwidth of a machine. `cache`: bytes of the last-level cache, None:
    unknown.
    """

    cpu: str
    cache: int | None
    readings: tuple[Reading, ...]

    @property
    def roof(self) -> float | None:
        """Bytes per second that memory itself delivers; None if no reading certainly exceeds the
        last-level cache.
        """
        reading = memory_bandwidth.roof(self.readings, self.cache)
        return reading.best if reading else None


@dataclass(frozen=True, slots=True)
class Point:
    """Generation at one depth: the cost of a token, and the tokens per second."""

    depth: int
    work: Work
    rate: float
    deviation: float

    def attainable(self, roof: float | None) -> float | None:
        """Return the tokens per second that a memory bandwidth of `roof` bytes per second
        allows.
        """
        return None if roof is None or self.work.nbytes is None else roof / self.work.nbytes

    def fraction(self, roof: float | None) -> float | None:
        """Return the share of the attainable rate that was reached."""
        most = self.attainable(roof)
        return None if most is None else self.rate / most

    def in_cache(self, cache: int | None) -> bool | None:
        """Return whether all data of a token may fit the last-level cache, so that memory is not
        the limit.
        """
        return None if cache is None or self.work.nbytes is None else self.work.nbytes <= cache

    def leaving(self, ridge: float | None) -> int | None:
        """Return from how many parallel sequences arithmetic limits generation instead of memory.

        Returns 0 if there is no such number, because every sequence adds its own KV cache, and None
        if it is unknown: the choice of experts of several sequences, for example, is not
        predictable.
        """
        if ridge is None or self.work.kv is None or self.work.attention is None or self.work.chosen:
            return None
        gained = self.work.operations + self.work.attention - ridge * self.work.kv
        return (
            0 if gained <= 0 else max(1, -int(-ridge * sum(self.work.weights.values()) // gained))
        )


@dataclass(frozen=True, slots=True)
class Result:
    """A model's speed on a machine. `operations_per_second`: of the fastest prompt, None if its
    cost is unknown. `tests`: all measured tests.
    """

    machine: Machine
    points: tuple[Point, ...]
    prompt_rate: float
    ubatch: int
    operations: float | None
    tests: tuple[kernel.Result, ...] = ()

    @property
    def ridge(self) -> float | None:
        """Operations per byte at which reading and computing take the same time."""
        roof = self.machine.roof
        return None if roof is None or self.operations is None else self.operations / roof


def machine(threads: int, watch: Callable[[], None]) -> Machine:
    """Measure the memory bandwidth with one thread and with `threads`. `on_reading` is called after
    each reading.
    """
    cache = host.last_cache()
    readings = []
    for nbytes in memory_bandwidth.sizes(cache, host.available_memory()):
        for n_threads in sorted({1, threads}):
            readings.append(memory_bandwidth.measure(nbytes, n_threads))
            watch()
    return Machine(host.cpu_name(), cache, tuple(readings))


def measure(
    model: Model,
    header: ModelHeader,
    read: Machine,
    base: Test,
    depths: Sequence[int],
    repetitions: int,
    watch: Callable[[], None],
) -> Result:
    """Measure prompts and generations with the settings of `base`. `on_test` is called after each
    test.
    """
    reading_pace = pace(lambda text: model.tokenize(text, special=False))
    subject = kernel.Subject(
        str(header.path), model.description, model.nbytes, model.n_params, reading_pace
    )

    tests = []

    def rates(n_prompt: int, n_gen: int, depth: int, ubatch: int) -> list[float]:
        test = Test(
            n_prompt,
            n_gen,
            depth,
            base.n_batch,
            ubatch,
            base.type_k,
            base.type_v,
            base.n_threads,
            base.n_gpu_layers,
            base.flash_attn,
        )
        tests.append(kernel.measure(model, subject, test, repetitions))
        watch()
        return tests[-1].samples_ts

    prompts = {ubatch: max(rates(PROMPT, 0, 0, ubatch)) for ubatch in UBATCHES}
    ubatch = max(prompts, key=lambda size: prompts[size])
    points = []
    for depth in depths:
        rates_at_depth = rates(0, GENERATED, depth, base.n_ubatch)
        # the cost in the middle of the generation
        cost = work(header, depth + GENERATED // 2, base.type_k, base.type_v)
        points.append(
            Point(depth, cost, kernel.average(rates_at_depth), kernel.deviation(rates_at_depth))
        )
    operations = prefill(header, PROMPT)
    operations_per_second = None if operations is None else operations / PROMPT * prompts[ubatch]
    return Result(read, tuple(points), prompts[ubatch], ubatch, operations_per_second, tuple(tests))
