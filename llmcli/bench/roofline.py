"""A comparison of a model's speed on this CPU with the limits that memory and arithmetic set.

The memory bandwidth and the model's prompt and generation speeds are measured. The bytes and
operations per token are computed from the file. The arithmetic limit is the rate of operations that
the model itself reached with its fastest prompt, because data sheet values are not attainable. GPUs
are not supported, because their bandwidth is not measured.
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
    """The measured memory bandwidth of a machine. `cache_bytes`: size of the last-level cache;
    None: unknown. `readings`: the measurements, which differ in buffer size and threads.
    """

    cpu: str
    cache_bytes: int | None
    readings: tuple[BandwidthReading, ...]

    @property
    def bandwidth(self) -> float | None:
        """The memory bandwidth in bytes per second. None if the cache size is unknown or no buffer
        was large enough to exceed the cache for certain.
        """
        reading = memory_bandwidth.memory_roof(self.readings, self.cache_bytes)
        return reading.best_rate if reading else None


@dataclass(frozen=True, slots=True)
class RooflinePoint:
    """The measured generation speed at one depth. `rate`: tokens per second, with its standard
    `deviation`. `token_cost`: the bytes and operations of one token at this depth.
    """

    depth: int
    token_cost: TokenCost
    rate: float
    deviation: float

    def attainable_rate(self, bandwidth: float | None) -> float | None:
        """Return the tokens per second that a memory bandwidth (bytes per second) allows. None if
        the bandwidth or the bytes per token are unknown.
        """
        return (
            None
            if bandwidth is None or self.token_cost.nbytes is None
            else bandwidth / self.token_cost.nbytes
        )

    def achieved_fraction(self, bandwidth: float | None) -> float | None:
        """Return the measured rate as a fraction of the attainable rate; None if the attainable
        rate is unknown.
        """
        attainable = self.attainable_rate(bandwidth)
        return None if attainable is None else self.rate / attainable

    def fits_cache(self, cache_bytes: int | None) -> bool | None:
        """Return whether all data of a token may fit into the last-level cache, so that the memory
        bandwidth is not a limit. None if unknown.
        """
        return (
            None
            if cache_bytes is None or self.token_cost.nbytes is None
            else self.token_cost.nbytes <= cache_bytes
        )

    def compute_bound_sequences(self, ridge: float | None) -> int | None:
        """Return the number of parallel sequences from which on generation is limited by arithmetic
        instead of memory. `ridge`: operations per byte at which both limits are equal.

        Returns 0 if no number is sufficient, because every sequence also reads its own KV cache.
        Returns None if the number is unknown, for example because it is unknown which experts
        several sequences use.
        """
        if (
            ridge is None
            or self.token_cost.kv_bytes is None
            or self.token_cost.attention_operations is None
            or self.token_cost.has_routed_experts
        ):
            return None
        operations_gained = (
            self.token_cost.weight_operations
            + self.token_cost.attention_operations
            - ridge * self.token_cost.kv_bytes
        )
        return (
            0
            if operations_gained <= 0
            else max(
                1, -int(-ridge * sum(self.token_cost.weight_bytes.values()) // operations_gained)
            )
        )


@dataclass(frozen=True, slots=True)
class RooflineResult:
    """The measured speed of a model on a machine. `points`: generation at each depth.
    `prompt_rate`: tokens per second of the fastest prompt, whose micro-batches had `ubatch` tokens.
    `operations_per_second`: the rate of operations of that prompt; None: unknown. `tests`: all
    measured tests.
    """

    machine: MachineBandwidth
    points: tuple[RooflinePoint, ...]
    prompt_rate: float
    ubatch: int
    operations_per_second: float | None
    tests: tuple[measure.SpeedResult, ...] = ()

    @property
    def ridge(self) -> float | None:
        """The operations per byte at which reading and computing take equally long; None:
        unknown.
        """
        roof = self.machine.bandwidth
        return (
            None
            if roof is None or self.operations_per_second is None
            else self.operations_per_second / roof
        )


def measure_machine(threads: int, on_reading: Callable[[], None]) -> MachineBandwidth:
    """Measure the memory bandwidth of this machine for several buffer sizes, with one thread and
    with `threads` threads. `on_reading` is called after each measurement.
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
    """Measure the speed of a model: prompts with different micro-batch sizes, and generation at
    each depth. All other settings come from `base`. `on_test` is called after each test.
    """
    reading_pace = measure_pace(lambda text: model.tokenize(text, special=False))
    subject = measure.ModelUnderTest(
        str(header.path), model.description, model.nbytes, model.n_params, reading_pace
    )

    tests = []

    def measure_rates(n_prompt: int, n_gen: int, depth: int, ubatch: int) -> list[float]:
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

    prompts = {ubatch: max(measure_rates(PROMPT_TOKENS, 0, 0, ubatch)) for ubatch in UBATCH_SIZES}
    ubatch = max(prompts, key=lambda size: prompts[size])
    points = []
    for depth in depths:
        rates_at_depth = measure_rates(0, GENERATED_TOKENS, depth, base.n_ubatch)
        # the cost grows linearly with the depth, so the middle token has the mean cost
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
