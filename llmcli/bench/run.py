"""Many tests over one file: each model loaded once, one after the other, progress shown."""

from functools import partial
from itertools import groupby
from pathlib import Path

from llmcli.bench import sweep
from llmcli.bench.grid import Test
from llmcli.bench.kernel import Result, Subject, measure, subject
from llmcli.errors import UserError
from llmcli.runtime import kv
from llmcli.runtime.binding.model import Model
from llmcli.types import Watcher
from quant import container


def run(
    path: Path, tests: list[Test], repetitions: int, watcher: Watcher, *, warmup: bool = True, swept: bool = False
) -> list[Result]:
    """Measure `tests` in order; raises Refusal for a damaged file, UserError where there is nothing to run.

    `swept`: they are compared with one another, so that all are measured in every round, and those that cannot be
    are left out.
    """
    if not tests:
        raise UserError("there is no test to run", hint="give -p or -n a number above 0, e.g. -p 512 -n 128")
    header = container.read(path)
    container.check(header)
    if swept:
        tests = sweep.allowed(tests, header.metadata)
    for test in tests:
        kv.check(header.metadata, test.type_k, test.type_v)
    results = []
    with watcher.bar(f"bench {path.name}", len(tests) * (repetitions if swept else 1), "tests") as bar:
        for layers, group in groupby(tests, key=lambda test: test.n_gpu_layers):
            with subject(path, layers) as (model, about):

                def measured(test: Test, count: int, model: Model = model, about: Subject = about) -> Result:
                    bar.describe(f"bench {test.name}")
                    found = measure(model, about, test, count, warmup=warmup)
                    bar.advance(1)
                    return found

                if swept:
                    results += sweep.rounds(list(group), repetitions, partial(measured, count=1))
                else:
                    results += [measured(test, repetitions) for test in group]
    return results
