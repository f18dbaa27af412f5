"""LoadResult: everything one run measured."""

from dataclasses import dataclass

from llmcli.bench.load import output
from llmcli.bench.load.ab_comparison import Versus
from llmcli.bench.load.max_load import Edge
from llmcli.bench.load.metrics import Figures


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Everything that one run measured."""

    environments: tuple[output.World, ...]
    measured: tuple[Figures, ...] = ()
    max_loads: tuple[Edge, ...] = ()
    comparisons: tuple[Versus, ...] = ()
