"""What a test needs before it begins: refused where its cache cannot be held, told where its
figures would mislead.
"""

from collections.abc import Sequence

from llmcli.bench.grid import Test
from llmcli.bench.kernel import options
from llmcli.errors import UserError
from llmcli.hardware import estimate, host
from llmcli.runtime.binding import devices
from llmcli.types import Watcher
from llmcli.units import size
from quant.container import Header


def check(header: Header, tests: Sequence[Test], watcher: Watcher) -> None:
    """Raise UserError for a test whose KV cache is larger than the free memory: the system would
    end the process.

    The watcher is told of weights that are (they are mapped, and read again from the disk), and of
    tests longer than what the model was trained for.
    """
    free = (
        None
        if any(one.kind in devices.GPUS for one in devices.devices())
        else host.available_memory()
    )
    if free is not None:
        for test in tests:
            need = _cache(header, test)
            if need > free:
                raise UserError(
                    f"{test.title} needs {size(need)} for its KV cache, and {size(free)} of memory are free",
                    hint="a smaller -d, -p or -np, or -ctk q8_0 -ctv q8_0",
                )
        if header.tensor_bytes > free:
            watcher.note(
                f"warning: the model has {size(header.tensor_bytes)} and {size(free)} of memory are free: "
                "what is measured is how fast the disk gives it again"
            )
    longest, trained = (
        max(test.n_depth + test.n_prompt + test.n_gen for test in tests),
        header.number("context_length"),
    )
    if trained and longest > trained:
        watcher.note(
            f"warning: {longest} tokens are more than the {trained} that this model was trained for: its speed there "
            "is measured, but nobody would read its text"
        )


def _cache(header: Header, test: Test) -> int:
    """Bytes of the cache, and of the copy of one sequence that is kept at a depth; 0: not known."""
    found = estimate.cache(header, options(test))
    if found is None:
        return 0
    return found.nbytes + (found.nbytes // test.n_parallel if test.n_depth else 0)
