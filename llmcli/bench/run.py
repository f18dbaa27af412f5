"""Many tests over one file: each model loaded once, one after the other, progress shown."""

from itertools import groupby
from pathlib import Path

from llmcli.bench.grid import Test
from llmcli.bench.kernel import Result, measure, subject
from llmcli.errors import UserError
from llmcli.runtime import kv
from llmcli.types import Watcher
from quant import container


def run(path: Path, tests: list[Test], repetitions: int, watcher: Watcher, *, warmup: bool = True) -> list[Result]:
    """Measure `tests` in order; raises Refusal for a damaged file, UserError where there is nothing to run."""
    if not tests:
        raise UserError("there is no test to run", hint="give -p or -n a number above 0, e.g. -p 512 -n 128")
    header = container.read(path)
    container.check(header)
    for test in tests:
        kv.check(header.metadata, test.type_k, test.type_v)
    results = []
    with watcher.bar(f"bench {path.name}", len(tests), "tests") as bar:
        for layers, group in groupby(tests, key=lambda test: test.n_gpu_layers):
            with subject(path, layers) as (model, about):
                for test in group:
                    bar.describe(f"bench {test.name}")
                    results.append(measure(model, about, test, repetitions, warmup=warmup))
                    bar.advance(1)
    return results
