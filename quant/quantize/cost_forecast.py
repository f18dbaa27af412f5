"""Forecast of the time and memory that encoding a plan's tensors takes.

Short trials on this machine give the speeds. GPTQ encodes random panels of two widths, and factors
second moments of two sizes: the time of a row of n columns is a n + b n^2, and that of a factor b
n^2 + c n^3, so that wider tensors follow. The time of other methods is proportional to the number
of values. Trials run on as many threads as the encoding, because threads share the memory's
bandwidth. No weight is read, because the weights may not exist yet.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from quant.calibration.expected_moments import ExpectedInput
from quant.calibration.imatrix import ImatrixEntry
from quant.calibration.statistics import InputStatistics
from quant.formats import FORMATS
from quant.methods import METHODS
from quant.methods.base import RowEncoder
from quant.methods.gptq import KEPT_FACTORS, Gptq, panel_rows
from quant.methods.hessian_factor import factor_moments
from quant.native import array_backends, blas_threads
from quant.native.processors import limit_workers, worker_count
from quant.quantize.pipeline import MAX_BUFFERED_BYTES
from quant.quantize.plan import TensorPlan
from quant.recipes import tensor_types

if TYPE_CHECKING:
    from quant.native.ggml import F32

TRIALS = 2
PANEL_TRIAL_ROWS, PANEL_TRIAL_COLUMNS = 256, (1024, 4096)
FACTOR_TRIAL_COLUMNS = (2048, 4096)
# Rows and columns of a trial of another method: few rows, and more if these take less than
# SHORT_SECONDS.
VALUE_TRIAL_ROWS, VALUE_TRIAL_COLUMNS, SHORT_SECONDS = (16, 256), 1024, 0.05
# Plans with fewer multiplications take less than a minute, and trials would be much of it.
MIN_MULTIPLICATIONS = 2e11
# F32 arrays of a panel that exist at the same time: weights, errors, levels, targets, codes of
# search, and products
PANEL_ARRAYS = 7
# Bytes of memory for each entry of a matrix of second moments: while it is factored (two F32
# matrices and the lower triangle of a third), and of the result (an F32 matrix and the lower
# triangle of another)
FACTORING_BYTES, FACTOR_BYTES = 4 + 4 + 2, 4 + 2


@dataclass(frozen=True, slots=True)
class CostForecast:
    """The forecast of an encoding: wall seconds; peak bytes of the arrays, without those of the
    process itself; and of these seconds those in which second moments are factored.
    """

    seconds: float
    memory_bytes: int
    factor_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PowerCurve:
    """The time of n columns: `low` n^`degree` + `high` n^(`degree` + 1)."""

    degree: int
    low: float
    high: float

    @classmethod
    def through(cls, degree: int, columns: Sequence[int], seconds: Sequence[float]) -> "PowerCurve":
        """Return the curve through two measurements. If one term were negative, the larger
        measurement alone decides, with the higher power.
        """
        few, many = columns
        first, second = (
            value / count**degree for value, count in zip(seconds, columns, strict=True)
        )
        high = (second - first) / (many - few)
        low = first - high * few
        return cls(degree, low, high) if min(low, high) >= 0 else cls(degree, 0.0, second / many)

    def seconds(self, columns: int) -> float:
        """Return the time of `columns` columns."""
        return float(self.low + self.high * columns) * float(columns) ** self.degree


@dataclass(frozen=True, slots=True)
class _EqualMoments:
    """Second moments of `columns` inputs that are equally correlated."""

    columns: int
    matrices: int = 1
    mixed: bool = False

    def mean(self, matrix: int = 0) -> "F32":
        """Return the second moments `[columns, columns]`."""
        import numpy as np

        moments = np.full((self.columns, self.columns), 0.5, np.float32)
        np.fill_diagonal(moments, 1.5)
        return moments

    def squares(self, matrix: int = 0) -> "F32":
        """Return their diagonal `[columns]`."""
        import numpy as np

        return np.full(self.columns, 1.5, np.float32)


@cache
def _equal_moments(columns: int) -> _EqualMoments:
    """Return the same object in every call, so that trials of several types share a factor."""
    return _EqualMoments(columns)


class _EqualSquares(ImatrixEntry):
    """Mean squares of columns that are equally important."""

    def mean_squares(self, first: int, last: int, columns: int) -> "F32":
        """Return ones `[last - first, columns]`."""
        import numpy as np

        return np.ones((last - first, columns), np.float32)


def is_worth_forecasting(steps: Sequence[TensorPlan]) -> bool:
    """Return whether GPTQ has enough to do that the trials take a small share of its time. On a GPU
    it has not: panels are as large as the GPU's memory allows, and trials would be, too.
    """
    solved = [step.weight for step in steps if isinstance(step.method, Gptq)]
    multiplications = sum(weight.elements * weight.columns for weight in solved)
    return multiplications > MIN_MULTIPLICATIONS and not array_backends.device()


def forecast_cost(steps: Sequence[TensorPlan], threads: int = 0) -> CostForecast:
    """Return the forecast of encoding the tensors `steps` in order. `threads` 0 uses all cores.

    Second moments that are not collected yet count like others.
    """
    solved = [step for step in steps if isinstance(step.method, Gptq)]
    others = [step for step in steps if step.method and not isinstance(step.method, Gptq)]
    factored = factored_columns(solved)
    with limit_workers(threads), blas_threads.limit_threads(1):
        factor_seconds = 0.0
        if factored:
            factor_time = _factor_time()
            factor_seconds = sum(map(factor_time.seconds, factored))
        row_times = {kind: _row_time(kind) for kind in {step.type for step in solved}}
        solving_seconds = sum(
            row_times[step.type].seconds(step.weight.columns) * _padded_rows(step)
            for step in solved
        )
        value_times: dict[tuple[str, str], float] = {}
        for step in others:
            assert step.method
            key = step.method.name, step.type
            if key not in value_times:
                value_times[key] = _seconds_per_value(*key)
            solving_seconds += value_times[key] * step.weight.elements
        memory_bytes = MAX_BUFFERED_BYTES + solver_bytes(solved, factored, worker_count())
    for method in METHODS.values():
        method.free_memory()
    return CostForecast(factor_seconds + solving_seconds, memory_bytes, factor_seconds)


def factored_columns(steps: Iterable[TensorPlan]) -> list[int]:
    """Return the number of columns of every factor that GPTQ computes for these tensors, if it
    keeps the latest ones.
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
    group = tensor_types.GROUP_OF_ROLE.get(tensor_types.tensor_role(name))
    block = tensor_types.tensor_order(name)[0]
    return (block, group, step.statistics.matrices) if group else name


def _padded_rows(step: TensorPlan) -> int:
    """Return the number of rows of a tensor with its panels padded."""
    width = panel_rows(step.statistics)
    return -(-step.statistics.rows // width) * width * step.statistics.matrices


def solver_bytes(solved: Sequence[TensorPlan], factored: Sequence[int], threads: int) -> int:
    """Return the peak bytes of GPTQ's arrays: of its factors, and of the larger of another factor
    in the making and the panels of all threads.
    """
    if not solved:
        return 0
    kept = [FACTOR_BYTES * columns**2 for columns in sorted(factored)[-KEPT_FACTORS:]]
    factoring = FACTORING_BYTES * max(factored) ** 2
    panel = max(
        4 * PANEL_ARRAYS * panel_rows(step.statistics) * step.weight.columns for step in solved
    )
    return max(sum(kept[:-1]) + factoring, sum(kept) + threads * panel)


def _factor_time() -> PowerCurve:
    """Return the time of factoring second moments, measured on this machine."""
    ops, columns = array_backends.array_backend(), FACTOR_TRIAL_COLUMNS
    factor_moments(_EqualMoments(columns[0] // 4).mean(), ops)  # loads what it needs
    times = [_time(partial(factor_moments, _EqualMoments(count).mean(), ops)) for count in columns]
    return PowerCurve.through(2, columns, times)


def _row_time(kind: str) -> PowerCurve:
    """Return the time of a row in a GPTQ panel of type `kind`, with all threads busy."""
    columns, rows = PANEL_TRIAL_COLUMNS, PANEL_TRIAL_ROWS
    times = [_trial_seconds("gptq", kind, rows, count) / rows for count in columns]
    return PowerCurve.through(1, columns, times)


def _seconds_per_value(method: str, kind: str) -> float:
    """Return the seconds of a value with a method whose time does not depend on the columns."""
    for rows in VALUE_TRIAL_ROWS:
        seconds = _trial_seconds(method, kind, rows, VALUE_TRIAL_COLUMNS)
        if seconds > SHORT_SECONDS:
            break
    return seconds / (rows * VALUE_TRIAL_COLUMNS)


def _trial_seconds(method: str, kind: str, rows: int, columns: int) -> float:
    """Return the seconds in which all threads together encode `rows` random rows each, divided by
    their number.
    """
    import numpy as np

    encode = _trial_encoder(method, kind, rows, columns)
    values = np.random.default_rng(0).standard_normal((rows, columns), np.float32)
    encode(values[:1], 0)  # factors the second moments
    threads = worker_count()
    with ThreadPoolExecutor(threads) as pool:
        return _time(lambda: [*pool.map(encode, [values] * threads, [0] * threads)]) / threads


def _trial_encoder(method: str, kind: str, rows: int, columns: int) -> RowEncoder:
    """Return the encoder of a matrix of equally important, equally correlated columns."""
    squares = _EqualSquares(Path(), 0, columns, (1.0,))
    statistics = InputStatistics("trial", columns, rows, 1, squares, _equal_moments(columns))
    return METHODS[method].make_encoder(FORMATS[kind], statistics)


def _time(task: Callable[[], object]) -> float:
    """Return the seconds that `task` takes: the shortest of TRIALS runs, which other programs and
    new memory disturb least.
    """
    times = []
    for _ in range(TRIALS):
        started = time.perf_counter()
        task()
        times.append(time.perf_counter() - started)
    return min(times)
