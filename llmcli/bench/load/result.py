"""LoadResult: everything one run measured."""

from dataclasses import dataclass

from llmcli.bench.load import output
from llmcli.bench.load.ab_comparison import ServerComparison
from llmcli.bench.load.max_load import MaxLoadResult
from llmcli.bench.load.metrics import LoadMetrics


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Everything that one run measured."""

    environments: tuple[output.LoadEnvironment, ...]
    measured: tuple[LoadMetrics, ...] = ()
    max_loads: tuple[MaxLoadResult, ...] = ()
    comparisons: tuple[ServerComparison, ...] = ()
