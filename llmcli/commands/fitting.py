"""The largest file that this machine's free memory runs: headers of mixes rehearsed, no weight
written or read.

What fits is llmcli plan's answer (hardware/plan.py) for the context that chat takes unless told.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from llmcli.errors import UserError
from llmcli.hardware import fit
from llmcli.hardware.plan import planner
from llmcli.runtime.binding.context import ContextOptions
from llmcli.runtime.request import RunOptions
from quant import container
from quant.allocate import Budget, Menu, allocate, reach
from quant.planning import Plan

CLOSE = 0.001  # of the bytes: how near to the limit the search goes


def largest(
    menu: Menu, fixed: int, planned: Callable[[Mapping[str, str]], Plan], path: Path
) -> int:
    """Bytes of the largest file made of this menu that fits; raises UserError where none does.
    `path` is scratch.
    """
    least, most = (size + fixed for size in reach(menu))

    def fitting(size: int) -> bool:
        return fits(planned(allocate(menu, Budget(size, fixed)).mix), path)

    if fitting(most):
        return most
    if not fitting(least):
        raise UserError(
            f"the smallest mix of these types, {least:,} bytes, does not fit into the memory that is free",
            hint="llmcli plan tells what takes it; other types with --types, or free some memory",
        )
    while most - least > CLOSE * most:
        middle = (least + most) // 2
        least, most = (middle, most) if fitting(middle) else (least, middle)
    return least


def fits(plan: Plan, path: Path) -> bool:
    """Whether the file that a plan would write runs with the default context in the memory that is
    free.
    """
    path.write_bytes(plan.layout.header)
    os.truncate(path, plan.nbytes)
    try:
        header = container.read(path)
        container.check(header)
        n_ctx = min(header.context_length or fit.ROOMY, fit.ROOMY)
        filled, layers = fit.decide(header, RunOptions(n_ctx), lambda text: None)
        assert filled.threads, filled
        options = ContextOptions(
            n_ctx,
            filled.batch_size,
            min(filled.ubatch_size, filled.batch_size),
            1,
            filled.threads,
            filled.threads_batch or filled.threads,
            filled.cache_type_k,
            filled.cache_type_v,
            filled.flash_attn,
        )
        with planner(header, options, layers) as held:
            answer = held.receipt().fits
    finally:
        path.unlink(missing_ok=True)
    if answer is None:
        raise UserError(
            "this machine does not tell how much memory is free",
            hint="--target-size names the bytes",
        )
    return answer
