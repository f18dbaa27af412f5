"""Memory checks before tests. A KV cache that does not fit into memory is an error. Conditions that
make a result misleading cause a warning.
"""

from collections.abc import Sequence

from llmcli.bench.speed.measure import build_context_options
from llmcli.bench.speed.parameter_grid import SpeedTest
from llmcli.errors import UserError
from llmcli.hardware import host
from llmcli.planning.prediction import upper_bound
from llmcli.planning.resolve_options import check_positions
from llmcli.runtime.binding.placement import devices
from llmcli.types import ProgressDisplay
from llmcli.units import format_size
from quant.model_file.model_header import ModelHeader


def require_memory(
    header: ModelHeader, tests: Sequence[SpeedTest], watcher: ProgressDisplay
) -> None:
    """Raise UserError if the KV cache of a test is larger than the free memory, because the
    operating system would kill the process, or if a test has more tokens than the model has
    positions.

    Also prints two warnings. If the weights are larger than the free memory, they are read from the
    disk again and again, and the disk limits the speed. If a test is longer than the context with
    which the model was trained, the generated text would be useless.
    """
    free = (
        None
        if any(device.kind in devices.GPU_KINDS for device in devices.list_devices())
        else host.available_memory()
    )
    if free is not None:
        for test in tests:
            need = _cache_bytes(header, test)
            if need > free:
                raise UserError(
                    f"{test.title} needs {format_size(need)} for its KV cache; {format_size(free)} of memory"
                    " are free",
                    hint="use a smaller -d, -p or -np, or -ctk q8_0 -ctv q8_0",
                )
        if header.tensor_bytes > free:
            watcher.note(
                f"warning: the model takes {format_size(header.tensor_bytes)}; {format_size(free)} of memory are"
                " free, so the disk's speed is measured"
            )
    longest, trained = (
        max(test.n_depth + test.n_prompt + test.n_gen for test in tests),
        header.get_int("context_length"),
    )
    check_positions(header, longest, "use a smaller -d, -p or -n")
    if trained and longest > trained:
        watcher.note(
            f"warning: {longest} tokens exceed the {trained} that the model was trained for: the"
            " speed is measured, but the text would be useless"
        )


def _cache_bytes(header: ModelHeader, test: SpeedTest) -> int:
    """Return the bytes of a test's KV cache. For a test with a depth, add the saved KV state of one
    sequence. Returns 0 if the size is unknown.
    """
    cache = upper_bound.predict_cache(header, build_context_options(test))
    if cache is None:
        return 0
    return cache.nbytes + (cache.nbytes // test.n_parallel if test.n_depth else 0)
