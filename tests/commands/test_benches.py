"""The contract of every subcommand of bench: a sentence, --json, and its name in --help."""

from collections.abc import Callable

import pytest

from llmcli.commands import benches
from quant.registry import collect
from tests.commands.conftest import Done

BENCHES = collect("llmcli.commands.benches", "BENCHES", "__name__")


@pytest.mark.parametrize("name", sorted(BENCHES))
def test_a_bench_is_explained_and_has_json(name: str, llmcli: Callable[..., Done]) -> None:
    assert (BENCHES[name].__doc__ or "").split("\n\n")[0].strip().endswith(".")
    done = llmcli("bench", name, "--help")
    assert done.code == 0
    assert "--json" in done.out
    assert name == benches.SPEED or f"bench {name}" in llmcli("bench", "--help").out
