"""Unloads idle models: those that are to make room, whose time is over, or whose file has changed."""

import asyncio
import time
from contextlib import suppress

from llmcli.serve.processes.models.memory_room import ROOM_REASON
from llmcli.serve.processes.models.pool_state import PoolState
from llmcli.serve.processes.models.pooled_model import PooledModel

MIN_CHECK_SECONDS, CHECK_SECONDS = 0.01, 2.0  # how often the files of loaded models are looked at


async def watch_models(state: PoolState) -> None:
    """Unload models of a pool until the task is canceled."""
    while True:
        now = time.monotonic()
        for model in tuple(state.models.values()):
            if model.state != "loaded":
                continue
            state.check_file(model)
            is_over = now >= model.expires_at and not model.served.is_pinned
            if not model.n_running and (model.drains_for or (is_over and not model.n_waiting)):
                _begin_unload(state, model)
        expiries = [
            model.expires_at - now
            for model in state.models.values()
            if model.is_ready and not model.n_running and not model.served.is_pinned
        ]
        with suppress(TimeoutError):
            async with asyncio.timeout(max(MIN_CHECK_SECONDS, min((CHECK_SECONDS, *expiries)))):
                await state.next_change()


def _begin_unload(state: PoolState, model: PooledModel) -> None:
    """Start to end the process of an idle model; ModelLoads notices when it has ended."""
    assert model.process is not None
    why = f" for {model.drains_for}" if model.drains_for else ""
    state.note(
        f"{model.name} is unloaded{why}".replace(f"for {ROOM_REASON}", f"to make {ROOM_REASON}")
    )
    model.state = "unloading"
    state.spawn(model.process.close())


def drain_missing(state: PoolState, model: PooledModel) -> None:
    """Let a model that is no longer offered end when it is idle."""
    if model.state == "loaded" and not model.drains_for:
        state.note(f"{model.name} is no longer offered: its process ends when it is idle")
        model.drains_for = "a removed name"
