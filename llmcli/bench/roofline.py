"""How far a model's speed on this machine is from what its memory allows.

Memory is read (bandwidth.py), the model's prompt and generation are measured (kernel.py), and each
is set beside the bytes and operations of a token (work.py). The rate of operations is the best that
this model's own prompts reach, not a data sheet's. CPU only: what a GPU reads is not measured, and
unknown.
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
    """What was read of memory. `cache`: bytes of the last cache, None: unknown."""

    cpu: str
    cache: int | None
    readings: tuple[Reading, ...]

    @property
    def roof(self) -> float | None:
        """Bytes a second that memory itself gives; None where no reading is known to be beyond the
        last cache.
        """
        found = memory_bandwidth.roof(self.readings, self.cache)
        return found.best if found else None


@dataclass(frozen=True, slots=True)
class Point:
    """Generation at one depth: what a token costs, and how many a second there were."""

    depth: int
    work: Work
    rate: float
    deviation: float

    def attainable(self, roof: float | None) -> float | None:
        """Tokens a second if reading were all."""
        return None if roof is None or self.work.nbytes is None else roof / self.work.nbytes

    def fraction(self, roof: float | None) -> float | None:
        """The part of the attainable that was reached."""
        most = self.attainable(roof)
        return None if most is None else self.rate / most

    def in_cache(self, cache: int | None) -> bool | None:
        """Whether all that a token reads may lie in the last cache: memory is no limit then."""
        return None if cache is None or self.work.nbytes is None else self.work.nbytes <= cache

    def leaving(self, ridge: float | None) -> int | None:
        """How many sequences at once are bound by operations rather than by reading; 0: none, their
        KV grows along.

        None where experts are chosen: more sequences choose more of them, which ones is not known.
        """
        if ridge is None or self.work.kv is None or self.work.attention is None or self.work.chosen:
            return None
        gained = self.work.operations + self.work.attention - ridge * self.work.kv
        return (
            0 if gained <= 0 else max(1, -int(-ridge * sum(self.work.weights.values()) // gained))
        )


@dataclass(frozen=True, slots=True)
class Result:
    """A model's speed on a machine. `operations`: a second, of the best of the prompts; None: its
    work is unknown. `tests`: all that was measured.
    """

    machine: Machine
    points: tuple[Point, ...]
    prompt_rate: float
    ubatch: int
    operations: float | None
    tests: tuple[kernel.Result, ...] = ()

    @property
    def ridge(self) -> float | None:
        """Operations a byte at which reading and computing take the same time."""
        roof = self.machine.roof
        return None if roof is None or self.operations is None else self.operations / roof


def machine(threads: int, watch: Callable[[], None]) -> Machine:
    """Read memory with one thread and with `threads`; `watch` is called after each reading."""
    cache = host.last_cache()
    readings = []
    for nbytes in memory_bandwidth.sizes(cache, host.available_memory()):
        for count in sorted({1, threads}):
            readings.append(memory_bandwidth.measure(nbytes, count))
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
    """Measure prompts and generation with the settings of `base`; `watch` is called after each
    test.
    """
    reading = pace(lambda text: model.tokenize(text, special=False))
    about = kernel.Subject(
        str(header.path), model.description, model.nbytes, model.n_params, reading
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
        tests.append(kernel.measure(model, about, test, repetitions))
        watch()
        return tests[-1].samples_ts

    prompts = {ubatch: max(rates(PROMPT, 0, 0, ubatch)) for ubatch in UBATCHES}
    ubatch = max(prompts, key=lambda one: prompts[one])
    points = []
    for depth in depths:
        found = rates(0, GENERATED, depth, base.n_ubatch)
        # A generation begins at its depth and goes on: its middle stands for it.
        cost = work(header, depth + GENERATED // 2, base.type_k, base.type_v)
        points.append(Point(depth, cost, kernel.average(found), kernel.deviation(found)))
    operations = prefill(header, PROMPT)
    rate = None if operations is None else operations / PROMPT * prompts[ubatch]
    return Result(read, tuple(points), prompts[ubatch], ubatch, rate, tuple(tests))
