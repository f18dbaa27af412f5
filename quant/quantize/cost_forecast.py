"""Forecast of the time and memory that encoding a plan's tensors takes.

Short trials on this machine give the speeds. Methods whose time is proportional to the number of
values encode a sample of the plan's own rows. GPTQ encodes random panels of two widths, and factors
random second moments of two sizes: the time of a row is a n + b n^2 and that of a factor b n^2 + c
n^3 for n columns, so that wider tensors follow. Trials run on as many threads as the encoding,
because threads share the memory's bandwidth.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from quant.calibration.expected_moments import ExpectedInput
from quant.calibration.statistics import InputStatistics
from quant.formats import FORMATS
from quant.methods import METHODS
from quant.methods.gptq import KEPT_FACTORS, PANEL_ROWS, Gptq, panel_rows
from quant.methods.hessian_factor import factor_moments
from quant.native import array_backends, ggml
from quant.native.processors import limit_workers, worker_count
from quant.quantize.pipeline import MAX_BUFFERED_BYTES
from quant.quantize.plan import TensorPlan
from quant.recipes import tensor_types

if TYPE_CHECKING:
    from quant.native.ggml import F32

PANEL_TRIAL_COLUMNS = (1024, 2048)
FACTOR_TRIAL_COLUMNS = (1536, 3072)
SAMPLE_VALUES = (1 << 14, 1 << 18)  # of a tensor; the second number if the first takes less than
SHORT_SECONDS = 0.05
# Plans with fewer multiplications take less than a minute, and trials would be much of it.
MIN_MULTIPLICATIONS = 2e11
# F32 arrays of a panel that exist at the same time: weights, errors, levels, targets, codes of
# search, and products
PANEL_ARRAYS = 7
# F64 matrices while second moments are factored (the damped one, its reversed copy, its factor),
# and F32 matrices (the moments as read, and the two of the result)
F64_MATRICES, F32_MATRICES, FACTOR_MATRICES = 3, 1, 2


@dataclass(frozen=True, slots=True)
class CostForecast:
    """The forecast of an encoding: wall seconds; peak bytes of the arrays, without those of the
    process itself; and of these seconds those in which second moments are factored.
    """

    seconds: float
    memory_bytes: int
    factor_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Power:
    """The time of n columns: `low` n^`degree` + `high` n^(`degree` + 1)."""

    degree: int
    low: float
    high: float

    def seconds(self, columns: int) -> float:
        """Return the time of `columns` columns."""
        return float(self.low + self.high * columns) * float(columns) ** self.degree


@dataclass(frozen=True, slots=True)
class _RandomMoments:
    """Second moments of `columns` inputs that are equally correlated."""

    columns: int
    matrices: int = 1
    mixed: bool = False

    def mean(self, matrix: int = 0) -> "F32":
        """Return the second moments `[columns, columns]`."""
        import numpy as np

        return np.full((self.columns, self.columns), 0.5, np.float32) + np.eye(
            self.columns, dtype=np.float32
        )

    def squares(self, matrix: int = 0) -> "F32":
        """Return their diagonal `[columns]`."""
        import numpy as np

        return np.full(self.columns, 1.5, np.float32)


def is_worth_forecasting(steps: Sequence[TensorPlan]) -> bool:
    """Return whether GPTQ has enough to do that the trials take a small share of its time."""
    solved = [step.weight for step in steps if isinstance(step.method, Gptq)]
    return sum(weight.elements * weight.columns for weight in solved) > MIN_MULTIPLICATIONS


def forecast_cost(steps: Sequence[TensorPlan], threads: int = 0) -> CostForecast:
    """Return the forecast of encoding the tensors `steps` in order. `threads` 0 uses all cores.

    Second moments that are not collected yet count like others.
    """
    solved = [step for step in steps if isinstance(step.method, Gptq)]
    others = [step for step in steps if step.method and not isinstance(step.method, Gptq)]
    with limit_workers(threads):
        factored = _factored_columns(solved)
        factor_time = _factor_time() if factored else None
        factor_seconds = sum(factor_time.seconds(columns) for columns in factored if factor_time)
        seconds = factor_seconds + sum(
            _panel_time(step.type).seconds(step.weight.columns) * _padded_rows(step)
            for step in solved
        )
        speeds: dict[tuple[str, str], float] = {}
        for step in others:
            assert step.method
            key = step.method.name, step.type
            if key not in speeds:
                speeds[key] = _seconds_per_value(step)
            seconds += speeds[key] * step.weight.elements
        memory = _memory_bytes(solved, factored)
    for method in METHODS.values():
        method.free_memory()
    return CostForecast(seconds, memory, factor_seconds)


def _factored_columns(steps: Iterable[TensorPlan]) -> list[int]:
    """Return the number of columns of every factor that GPTQ computes for these tensors, with the
    latest ones kept.
    """
    columns, latest = [], list[tuple[object, int]]()
    for step in steps:
        for matrix in range(step.statistics.matrices):
            if (key := (_input_key(step), matrix)) not in latest:
                latest = [*latest[-KEPT_FACTORS + 1 :], key]
                columns.append(step.weight.columns)
    return columns


def _input_key(step: TensorPlan) -> object:
    """Return a value that is equal for tensors with the same second moments. Before these are
    collected, queries and keys of a block are taken to share them, and so are gate and up.
    """
    moments, name = step.statistics.moments, step.weight.name
    if not isinstance(moments, ExpectedInput):
        return id(moments)
    role = tensor_types.tensor_role(name)
    group = tensor_types.GROUP_OF_ROLE.get(role, role)
    return tensor_types.tensor_order(name)[0], group


def _padded_rows(step: TensorPlan) -> int:
    """Return the number of rows of a tensor with its panels padded."""
    width = panel_rows(step.statistics)
    return -(-step.statistics.rows // width) * width * step.statistics.matrices


def _memory_bytes(solved: Sequence[TensorPlan], factored: Sequence[int]) -> int:
    """Return the peak bytes of an encoding's arrays: the rows that wait, and with GPTQ the factors
    and the panels of all threads.
    """
    if not solved:
        return MAX_BUFFERED_BYTES
    kept = [4 * FACTOR_MATRICES * columns**2 for columns in sorted(factored)[-KEPT_FACTORS:]]
    factoring = (8 * F64_MATRICES + 4 * F32_MATRICES) * max(factored) ** 2
    panel = max(
        4 * PANEL_ARRAYS * panel_rows(step.statistics) * step.weight.columns for step in solved
    )
    return MAX_BUFFERED_BYTES + max(sum(kept[:-1]) + factoring, sum(kept) + worker_count() * panel)


@cache
def _factor_time() -> _Power:
    """Return the time of factoring second moments, measured on this machine."""
    ops = array_backends.array_backend(array_backends.device())

    def factor(columns: int) -> float:
        mean = _RandomMoments(columns).mean()
        return _time(lambda: factor_moments(mean, ops))

    return _fit(2, FACTOR_TRIAL_COLUMNS, [factor(columns) for columns in FACTOR_TRIAL_COLUMNS])


@cache
def _panel_time(kind: str) -> _Power:
    """Return the time of a row in a GPTQ panel of type `kind`, with all threads busy."""
    return _fit(1, PANEL_TRIAL_COLUMNS, [_row_seconds(kind, at) for at in PANEL_TRIAL_COLUMNS])


def _row_seconds(kind: str, columns: int) -> float:
    """Return the seconds of one row of `columns` columns when all threads encode panels."""
    import numpy as np

    statistics = InputStatistics("trial", columns, PANEL_ROWS, 1, None, _RandomMoments(columns))
    encode = METHODS["gptq"].make_encoder(FORMATS[kind], statistics)
    rows = np.random.default_rng(0).standard_normal((PANEL_ROWS, columns), np.float32)
    encode(rows[:1], 0)  # factors the second moments
    seconds = _time_on_threads(lambda: encode(rows, 0))
    return seconds / (PANEL_ROWS * worker_count())


def _seconds_per_value(step: TensorPlan) -> float:
    """Return the seconds of a value in an encoder whose time does not depend on the columns."""
    weight, encode = step.weight, step.make_encoder()
    for values in SAMPLE_VALUES:
        count = max(1, min(weight.rows, values // weight.columns))
        rows = ggml.decode(weight.read(0, count), weight.type, weight.columns, label=weight.name)
        seconds = _time_on_threads(lambda rows=rows: encode(rows, 0))  # type: ignore[misc]
        if seconds > SHORT_SECONDS:
            break
    return seconds / (rows.size * worker_count())


def _time_on_threads(task: Callable[[], object]) -> float:
    """Return the seconds until all threads have run `task` once."""
    with ThreadPoolExecutor(worker_count()) as pool:
        return _time(lambda: list(pool.map(lambda _: task(), range(worker_count()))))


def _time(task: Callable[[], object]) -> float:
    """Return the seconds that `task` takes."""
    started = time.perf_counter()
    task()
    return time.perf_counter() - started


def _fit(degree: int, columns: Sequence[int], seconds: Sequence[float]) -> _Power:
    """Return the curve through two measurements. If one term were negative, the larger measurement
    alone decides, with the higher power.
    """
    (few, many), (first, second) = (
        columns,
        (value / count**degree for value, count in zip(seconds, columns, strict=True)),
    )
    high = (second - first) / (many - few)
    low = first - high * few
    if low < 0 or high < 0:
        return _Power(degree, 0.0, second / many)
    return _Power(degree, low, high)
