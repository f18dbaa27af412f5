"""Saves the cached tokens of a slot to a file, restores them, and erases them: the actions of
llama-server's `/slots/{id}`. The format is that of kv_state_file.py, which says with which model a
state was computed.

The cells are copied on the engine's thread, between two passes. Files are read and written in worker
threads.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from llmcli.api.errors import ApiError
from llmcli.atomic_files import write_atomically
from llmcli.errors import UserError
from llmcli.runtime import kv_state_file
from llmcli.runtime.kv_state_file import SequenceState, UnusableState
from llmcli.runtime.runner import Runner
from llmcli.serve.engine_thread.bridge import EngineBridge

BUSY_SECONDS = 60.0  # how long an action waits for the answer in its slot
PAUSE_SECONDS = 0.02  # between two checks whether the slot is idle
MAX_NAME_BYTES = 200
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SlotReport:
    """The result of an action: how many tokens it concerned, the bytes of the file, and how long it
    took.
    """

    n_tokens: int
    n_bytes: int = 0
    milliseconds: float = 0.0


def file_in(folder: Path, name: str) -> Path:
    """Return the path of a file in the folder for slots. Raises ApiError for a name that leads
    elsewhere, is hidden, or cannot be written by every program.
    """
    encoded = name.encode("utf-8", "replace")
    if (
        not 0 < len(encoded) <= MAX_NAME_BYTES
        or name.startswith(".")
        or name != name.strip(". ")
        or any(character in '/\\:*?"<>|' or not character.isprintable() for character in name)
    ):
        raise ApiError(
            f"filename must be 1 to {MAX_NAME_BYTES} bytes: letters, digits and signs such as - and _,"
            " without a folder",
            param="filename",
        )
    return folder / name


async def save_slot(bridge: EngineBridge, slot: int, path: Path) -> SlotReport:
    """Write the cached tokens of a slot and their cells to a file, which replaces an earlier one.
    Raises ApiError if the slot is empty or its state incomplete, and UserError if the file cannot
    be written.
    """
    started_at = time.perf_counter()
    state = await _when_idle(bridge, slot, lambda: _copy(bridge.runner, slot))
    n_bytes = await asyncio.to_thread(_write, bridge.runner, state, path)
    return SlotReport(len(state.tokens), n_bytes, _milliseconds_since(started_at))


async def restore_slot(bridge: EngineBridge, slot: int, path: Path, scope: str = "") -> SlotReport:
    """Replace the cached tokens of a slot by those of a file. `scope`: the client that may reuse
    them; empty: all. Raises ApiError if the file is missing, damaged or of another model.
    """
    started_at = time.perf_counter()
    state, n_bytes = await asyncio.to_thread(_read, bridge.runner, path)
    await _when_idle(bridge, slot, lambda: _restore(bridge.runner, slot, state, scope))
    return SlotReport(len(state.tokens), n_bytes, _milliseconds_since(started_at))


async def erase_slot(bridge: EngineBridge, slot: int) -> SlotReport:
    """Drop the cached tokens of a slot."""

    def erase() -> int:
        engine = bridge.runner.engine
        n_offloaded = engine.scheduler.idle_offload.drop_slot(slot)
        return engine.ledger.empty_slot(slot) or n_offloaded

    return SlotReport(await _when_idle(bridge, slot, erase))


async def _when_idle(bridge: EngineBridge, slot: int, action: Callable[[], T]) -> T:
    """Run a function on the engine's thread as soon as no answer runs in a slot, and return its
    result. Raises ApiError if the slot does not exist or stays busy.
    """
    ledger = bridge.runner.engine.ledger
    if not 0 <= slot < len(ledger.tokens):
        raise ApiError(f"there is no slot {slot}; the last one is {len(ledger.tokens) - 1}")
    is_done, result = False, None

    def act_if_idle() -> None:
        nonlocal is_done, result
        if not ledger.is_busy(slot):
            result = action()
            is_done = True

    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        await bridge.run_on_engine_thread(act_if_idle)
        if is_done:
            return result  # type: ignore[return-value]
        if time.monotonic() > deadline:
            raise ApiError(f"slot {slot} is busy; retry later", 503, code="busy")
        await asyncio.sleep(PAUSE_SECONDS)


def _copy(runner: Runner, slot: int) -> SequenceState:
    """Return a copy of the tokens and cells of a slot."""
    engine = runner.engine
    if not engine.scheduler.idle_offload.restore_slot(slot):
        message = f"the context has no room for the tokens of slot {slot} now; retry later"
        raise ApiError(message, 503, code="busy")
    tokens = engine.ledger.tokens[slot]
    if not tokens:
        raise ApiError(f"slot {slot} is empty")
    if not kv_state_file.has_complete_state(runner, len(tokens)):
        raise ApiError(
            "with --reproducible, the state of this model cannot be saved after so many tokens", 501
        )
    return SequenceState(tuple(tokens), runner.context.read_state(slot))


def _write(runner: Runner, state: SequenceState, path: Path) -> int:
    """Write a state to a file, and return its number of bytes."""
    identity = kv_state_file.state_identity(runner)
    if identity is None:
        raise UserError(
            "the model's file has changed since it was loaded", hint="restart the server"
        )
    pieces = kv_state_file.encode_state(state, identity)
    # only the operator may read the file, because it reveals the conversation
    write_atomically(path, *pieces, mode=0o600)
    return sum(map(len, pieces))


def _read(runner: Runner, path: Path) -> tuple[SequenceState, int]:
    """Return the state in a file, and the bytes of the file."""
    try:
        with path.open("rb") as file:
            state = kv_state_file.read_state(file, runner)
            return state, file.seek(0, 2)
    except FileNotFoundError:
        raise ApiError(f"there is no saved slot {path.name!r}", param="filename") from None
    except OSError as error:
        raise ApiError(f"{path.name} cannot be read: {error.strerror}", 500) from None
    except UnusableState as error:
        raise ApiError(f"{path.name} cannot be restored: {error}", param="filename") from None


def _restore(runner: Runner, slot: int, state: SequenceState, scope: str) -> None:
    """Write a state into an idle slot."""
    engine = runner.engine
    engine.scheduler.idle_offload.drop_slot(slot)
    if len(state.tokens) > engine.ledger.size:
        raise ApiError(
            f"the file has {len(state.tokens)} tokens; the context holds {engine.ledger.size}"
        )
    is_restored = engine.ledger.restore_state(
        state.tokens,
        lambda number: runner.context.write_state(number, state.state),
        slot=slot,
        scope=scope,
    )
    if not is_restored:
        raise ApiError("the context has no room for the file's tokens now, or refuses them", 503)


def _milliseconds_since(started_at: float) -> float:
    return (time.perf_counter() - started_at) * 1e3
