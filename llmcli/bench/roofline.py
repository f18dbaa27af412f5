"""A comparison of a model's speed on this machine with the limits that memory and arithmetic set.

The memory bandwidth and the model's prompt and generation speeds are measured. The bytes and
operations of a token are computed. The arithmetic limit is not that of a data sheet: it is the rate
of operations that this model reached with its fastest prompt. For CPUs only, because the bandwidth
of a GPU is not measured.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmcli.bench.cost import memory_bandwidth
from llmcli.bench.cost.memory_bandwidth import BandwidthReading
from llmcli.bench.cost.token_cost import TokenCost, prompt_operations, token_cost
from llmcli.bench.speed import measure
from llmcli.bench.speed.parameter_grid import SpeedTest
from llmcli.hardware import host
from llmcli.reading_speed import measure_pace
from llmcli.runtime.binding.model import Model
from quant.model_file.model_header import ModelHeader

# tokens of a measured prompt, micro-batch sizes in tokens, tokens of a generation
PROMPT_TOKENS, UBATCH_SIZES, GENERATED_TOKENS = 512, (128, 512), 32


@dataclass(frozen=True, slots=True)
class MachineBandwidth:
    """The measured memory bandwidth of a machine. `cache_bytes`: size of the last-level cache,
    None: unknown.
    """

    cpu: str
    cache_bytes: int | None
    readings: tuple[BandwidthReading, ...]

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second that memory itself delivers. None if it is not certain for any reading
        that it exceeded the last-level cache.
        """
        reading = memory_bandwidth.memory_roof(self.readings, self.cache_bytes)
        return reading.best_rate if reading else None


@dataclass(frozen=True, slots=True)
class RooflinePoint:
    """The measured generation at one depth. `rate`: tokens per second. `token_cost`: what one of
    these tokens costs.
    """

    depth: int
    token_cost: TokenCost
    rate: float
    deviation: float

    def attainable_rate(self, bandwidth: float | None) -> float | None:
        """Return the tokens per second that a memory bandwidth in bytes per second allows; None if
        either is unknown.
        """
        return (
            None
            if bandwidth is None or self.token_cost.nbytes is None
            else bandwidth / self.token_cost.nbytes
        )

    def achieved_fraction(self, bandwidth: float | None) -> float | None:
        """Return the measured rate as a fraction of the attainable rate; None if that is unknown."""
        most = self.attainable_rate(bandwidth)
        return None if most is None else self.rate / most

    def fits_cache(self, cache_bytes: int | None) -> bool | None:
        """Return whether the last-level cache may hold all data of a token, so that memory is not
        the limit; None if unknown.
        """
        return (
            None
            if cache_bytes is None or self.token_cost.nbytes is None
            else self.token_cost.nbytes <= cache_bytes
        )

    def compute_bound_sequences(self, ridge: float | None) -> int | None:
        """Return the number of parallel sequences at which generation is no longer limited by
        memory, but by arithmetic. `ridge`: operations per byte at which both limits are equal.

        Returns 0 if there is no such number, because every sequence adds the reading of its own KV
        cache. Returns None if it is unknown, for example because it is not known which experts
        several sequences choose.
        """
        if (
            ridge is None
            or self.token_cost.kv_bytes is None
            or self.token_cost.attention_operations is None
            or self.token_cost.has_routed_experts
        ):
            return None
        gained = (
            self.token_cost.weight_operations
            + self.token_cost.attention_operations
            - ridge * self.token_cost.kv_bytes
        )
        return (
            0
            if gained <= 0
            else max(1, -int(-ridge * sum(self.token_cost.weight_bytes.values()) // gained))
        )


@dataclass(frozen=True, slots=True)
class RooflineResult:
    """The measured speed of a model on a machine. `prompt_rate`: tokens per second of the fastest
    prompt, which had micro-batches of `ubatch` tokens. `operations_per_second`: rate of operations
    of that prompt, None if unknown. `tests`: all measured tests.
    """

    machine: MachineBandwidth
    points: tuple[RooflinePoint, ...]
    prompt_rate: float
    ubatch: int
    operations_per_second: float | None
    tests: tuple[measure.SpeedResult, ...] = ()

    @property
    def ridge(self) -> float | None:
        """The operations per byte at which reading and computing take equally long; None if
        unknown.
        """
        roof = self.machine.bandwidth
        return (
            None
            if roof is None or self.operations_per_second is None
            else self.operations_per_second / roof
        )


def measure_machine(threads: int, on_reading: Callable[[], None]) -> MachineBandwidth:
    """Measure the memory bandwidth of this machine with one thread and with `threads` threads.
    `on_reading` is called after each reading.
    """
    cache = host.last_cache_bytes()
    readings = []
    for nbytes in memory_bandwidth.buffer_sizes(cache, host.available_memory()):
        for n_threads in sorted({1, threads}):
            readings.append(memory_bandwidth.measure_bandwidth(nbytes, n_threads))
            on_reading()
    return MachineBandwidth(host.cpu_name(), cache, tuple(readings))


def measure_model(
    model: Model,
    header: ModelHeader,
    machine_bandwidth: MachineBandwidth,
    base: SpeedTest,
    depths: Sequence[int],
    repetitions: int,
    on_test: Callable[[], None],
) -> RooflineResult:
    """Measure the speed of prompts and generations of a model, with the settings of `base`.
    `on_test` is called after each test.
    """
    reading_pace = measure_pace(lambda text: model.tokenize(text, special=False))
    subject = measure.ModelUnderTest(
        str(header.path), model.description, model.nbytes, model.n_params, reading_pace
    )

    tests = []

    def rates(n_prompt: int, n_gen: int, depth: int, ubatch: int) -> list[float]:
        test = SpeedTest(
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
        tests.append(measure.measure_test(model, subject, test, repetitions))
        on_test()
        return tests[-1].samples_ts

    prompts = {ubatch: max(rates(PROMPT_TOKENS, 0, 0, ubatch)) for ubatch in UBATCH_SIZES}
    ubatch = max(prompts, key=lambda size: prompts[size])
    points = []
    for depth in depths:
        rates_at_depth = rates(0, GENERATED_TOKENS, depth, base.n_ubatch)
        # the mean cost of a token: that of the middle one
        cost = token_cost(header, depth + GENERATED_TOKENS // 2, base.type_k, base.type_v)
        points.append(
            RooflinePoint(
                depth,
                cost,
                measure.average(rates_at_depth),
                measure.standard_deviation(rates_at_depth),
            )
        )
    operations = prompt_operations(header, PROMPT_TOKENS)
    operations_per_second = (
        None if operations is None else operations / PROMPT_TOKENS * prompts[ubatch]
    )
    return RooflineResult(
        machine_bandwidth,
        tuple(points),
        prompts[ubatch],
        ubatch,
        operations_per_second,
        tuple(tests),
    )
