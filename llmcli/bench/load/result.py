"""The result of `bench load`."""

from dataclasses import dataclass

from llmcli.bench.load import output
from llmcli.bench.load.ab_comparison import ServerComparison
from llmcli.bench.load.max_load import MaxLoadResult
from llmcli.bench.load.metrics import LoadMetrics


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Everything that one call of `bench load` measured. Only the field of the requested
    measurement is filled: `measured` for loads, `max_loads` for a search, `comparisons` for two
    servers.

    `environments`: one for each server.
    """

    environments: tuple[output.LoadEnvironment, ...]
    measured: tuple[LoadMetrics, ...] = ()
    max_loads: tuple[MaxLoadResult, ...] = ()
    comparisons: tuple[ServerComparison, ...] = ()
