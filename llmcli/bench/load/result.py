"""The result of `bench load`."""

from dataclasses import dataclass

from llmcli.bench.load import output
from llmcli.bench.load.ab_comparison import ServerComparison
from llmcli.bench.load.max_load import MaxLoadResult
from llmcli.bench.load.metrics import LoadMetrics


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The results of one call of `bench load`. It fills one of three fields: `measured` for a list
    of loads, `max_loads` for a search for the largest load, or `comparisons` for two servers.

    `environments`: the conditions on each server.
    """

    environments: tuple[output.LoadEnvironment, ...]
    measured: tuple[LoadMetrics, ...] = ()
    max_loads: tuple[MaxLoadResult, ...] = ()
    comparisons: tuple[ServerComparison, ...] = ()
