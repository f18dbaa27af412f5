"""What every subcommand of `bench` must have: a help text whose first paragraph is a sentence,
--json, and its name in the help of `bench`.
"""

from collections.abc import Callable

import pytest

from llmcli.commands import bench
from quant.registry import collect
from tests.fixtures.cli import Done

BENCHES = collect("llmcli.commands.bench", "BENCHES", "__name__")


@pytest.mark.parametrize("name", sorted(BENCHES))
def test_every_bench_command_has_help_and_json(name: str, llmcli: Callable[..., Done]) -> None:
    assert (BENCHES[name].__doc__ or "").split("\n\n")[0].strip().endswith(".")
    done = llmcli("bench", name, "--help")
    assert done.code == 0
    assert "--json" in done.out
    assert name == bench.DEFAULT_BENCH or f"bench {name}" in llmcli("bench", "--help").out
