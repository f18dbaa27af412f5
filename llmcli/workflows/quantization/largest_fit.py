"""Finds the largest file with which a model runs in the free memory. Only file headers are written
for this; no weights are read or written.

A file fits if `llmcli plan` says so with chat's default context.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from llmcli.errors import UserError
from llmcli.planning import resolve_options
from llmcli.planning.dry_runs.memory_plan import open_memory_planner
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.requests.request import RunOptions
from quant.allocation.allocate import Budget, TypeMenu, allocate, size_range
from quant.model_file import load_checks, read_header
from quant.quantize.plan import Plan

SEARCH_TOLERANCE = 0.001  # the search ends at this difference, relative to the size of the file


def largest_file_that_fits(
    menu: TypeMenu, fixed_bytes: int, build_plan: Callable[[Mapping[str, str]], Plan], path: Path
) -> int:
    """Return the size in bytes of the largest file that fits into memory, with tensor types from
    `menu`.

    `fixed_bytes`: bytes of the file that do not depend on the types. `build_plan`: returns the plan
    of a mix. `path`: a scratch file for headers. Raises UserError if no file fits.
    """
    fitting_bytes, limit_bytes = (size + fixed_bytes for size in size_range(menu))

    def size_fits(size: int) -> bool:
        return fits(build_plan(allocate(menu, Budget(size, fixed_bytes)).mix), path)

    if size_fits(limit_bytes):
        return limit_bytes
    if not size_fits(fitting_bytes):
        raise UserError(
            f"the smallest mix of these types, {fitting_bytes:,} bytes, does not fit into the free "
            "memory",
            hint="llmcli plan shows what takes memory; try other --types, or free some memory",
        )
    while limit_bytes - fitting_bytes > SEARCH_TOLERANCE * limit_bytes:
        middle_bytes = (fitting_bytes + limit_bytes) // 2
        fitting_bytes, limit_bytes = (
            (middle_bytes, limit_bytes)
            if size_fits(middle_bytes)
            else (fitting_bytes, middle_bytes)
        )
    return fitting_bytes


def fits(plan: Plan, path: Path) -> bool:
    """Return whether the model of a plan runs in the free memory with the default context. `path`:
    a scratch file for the header. Raises UserError if the free memory is unknown.
    """
    path.write_bytes(plan.layout.header)
    os.truncate(path, plan.nbytes)
    try:
        header = read_header.read_header(path)
        load_checks.check_loadable(header)
        n_ctx = min(
            header.context_length or resolve_options.DEFAULT_MAX_CTX,
            resolve_options.DEFAULT_MAX_CTX,
        )
        resolved, placement = resolve_options.resolve_options(
            header, RunOptions(n_ctx), lambda text: None
        )
        assert resolved.threads, resolved
        options = ContextOptions(
            n_ctx,
            resolved.batch_size,
            min(resolved.ubatch_size, resolved.batch_size),
            1,
            resolved.threads,
            resolved.threads_batch or resolved.threads,
            resolved.cache_type_k,
            resolved.cache_type_v,
            resolved.flash_attn,
        )
        with open_memory_planner(header, options, placement) as open_planner:
            plan_fits = open_planner.memory_plan().fits
    finally:
        path.unlink(missing_ok=True)
    if plan_fits is None:
        raise UserError(
            "this machine does not report its free memory",
            hint="use --target-size instead of --fit",
        )
    return plan_fits
