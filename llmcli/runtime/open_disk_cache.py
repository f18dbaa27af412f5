"""Opens the prefix cache on disk of a runner."""

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmcli.errors import UserError
from llmcli.runtime.disk_cache.disk_cache import DiskCache
from llmcli.runtime.disk_cache.folder import StateFolder
from llmcli.runtime.kv_state_file import state_identity
from llmcli.runtime.runner import Runner

CLOSE_SECONDS = 10.0  # how long the end of a server waits for states to be written


@contextmanager
def open_disk_cache(
    runner: Runner, folder: Path, max_bytes: int, report: Callable[[str], None]
) -> Iterator[None]:
    """Let the engine of a runner save states of answers in `folder`, and find them there, during the
    `with` block. `max_bytes`: the quota of the folder. `report`: called with a line for the log.

    What is wrong with the folder is reported, and harms no answer. Raises UserError for a model
    whose states cannot be saved.
    """
    world = _state_world(runner)
    cache = DiskCache(
        StateFolder(folder, world, max_bytes, runner.header.files),
        runner.engine.scheduler.offload_store,
        runner.model.n_vocab,
        report,
        by_channel=runner.options.flash_attn == "off",
    )
    try:
        cache.folder.open()
    except (UserError, OSError) as error:
        cache.writer.pause(str(error))
    runner.engine.scheduler.disk_cache = cache
    try:
        yield
    finally:
        cache.close(CLOSE_SECONDS)


def _state_world(runner: Runner) -> dict[str, Any]:
    """Return what a state depends on: the model, the build of llama.cpp, and the settings of the
    context. Raises UserError if its states cannot be saved.
    """
    context, options = runner.context, runner.options
    if options.reproducible:
        raise UserError(
            "--cache-dir does not work with --reproducible: a restored state would fill cells in"
            " another order",
            hint="leave one of them out",
        )
    if not runner.can_generate:
        raise UserError(
            "--cache-dir needs a model with a KV cache", hint="leave it out for this model"
        )
    identity = state_identity(runner)
    if identity is None:
        raise UserError("the model's file has changed since it was loaded", hint="start again")
    world = identity.as_dict()
    del world["template"]  # it decides on tokens, which an entry has, but not on their state
    # The values of a plain cache are stored by channel or by cell, and are put into the order of
    # the context when they are read. `serve` chooses the order for the machine, by measurement.
    del world["flash"]
    return {
        **world,
        "flash": "any" if runner.engine.ledger.can_fork else options.flash_attn,
        "machine": platform.machine(),
        "windows": context.n_swa,
        "is_recurrent": context.is_recurrent,
        "n_rs_seq": context.n_rs_seq,
        "is_unified": context.unified,
        "keeps_hidden_states": context.outputs_states,
    }
