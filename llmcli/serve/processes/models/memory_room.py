"""Makes room for a model: reserves its bytes on the host and on each GPU, after others were unloaded.

If idle models are not enough, busy ones get no further requests until they are idle and unloaded.
Requests that arrive for them meanwhile wait for their turn.
"""

import math
from collections.abc import Collection

from llmcli.errors import UserError
from llmcli.runtime.binding.placement.devices import HOST_DEVICE
from llmcli.serve.processes.models.admission import BytesByDevice, Resident, choose_unloads
from llmcli.serve.processes.models.pool_state import PoolState
from llmcli.serve.processes.models.pooled_model import LoadAbandoned, PooledModel
from llmcli.units import format_size

MAX_STATES_SHARE = 8  # states of answers get at most this part of the limit for each model
ROOM_REASON = "room for "  # why a model drains, before the name of another model


class MemoryRoom:
    """The memory of a pool."""

    def __init__(self, state: PoolState) -> None:
        self._state = state

    def free_beside_pinned(self, model: PooledModel) -> dict[str, int]:
        """Return the bytes that a model may take on each device if only the pinned ones stay."""
        return {
            device: limit - self._pinned_bytes(model, device)
            for device, limit in self._state.limits.items()
        }

    def limits_of_plan(self, model: PooledModel) -> dict[str, int]:
        """Return the bytes that a model may take on each device, as free_beside_pinned(). A GPU on
        which no model is has no limit but its free memory, which other programs may have changed.
        """
        return {
            device: nbytes
            for device, nbytes in self.free_beside_pinned(model).items()
            if device == HOST_DEVICE or self._state.reserved_bytes(device)
        }

    def bytes_to_reserve(self, model: PooledModel) -> BytesByDevice:
        """Return the bytes that count for a planned model: what it needs, and on the host room for
        states of answers if the limit has any.
        """
        assert model.memory is not None
        memory, limit = model.memory, self._state.limits[HOST_DEVICE]
        free = self.free_beside_pinned(model)[HOST_DEVICE] - memory.needed_bytes
        states = max(0, min(memory.states, limit // MAX_STATES_SHARE, free))
        return {HOST_DEVICE: memory.needed_bytes + states, **memory.devices}

    def has_room(self, model: PooledModel) -> bool:
        """Return whether a planned model fits beside the models that are busy now."""
        unloads = choose_unloads(
            self._residents(model), self.bytes_to_reserve(model), self._state.limits
        )
        return unloads is not None and not any(resident.is_busy for resident in unloads)

    async def reserve(self, model: PooledModel, nbytes: BytesByDevice) -> None:
        """Unload models until one more of `nbytes` fits, and reserve them. Raises UserError if they
        never fit, and LoadAbandoned if its clients leave meanwhile.
        """
        try:
            while unloads := self._choose_unloads(model, nbytes):
                self._drain_for(model, unloads)
                if not model.is_wanted:
                    raise LoadAbandoned
                self._state.report_change()  # idle ones are unloaded by ModelWatch
                await self._state.next_change()
        finally:
            self._drain_for(model, ())
        model.reserved = nbytes

    def _residents(self, model: PooledModel) -> list[Resident]:
        """Return the other models that take memory."""
        return [
            Resident(
                other.name,
                other.reserved,
                # one that ends already is the best choice
                -math.inf if other.state == "unloading" else other.last_used,
                is_busy=other.n_running > 0 and other.state == "loaded",
                is_pinned=other.served.is_pinned,
            )
            for other in self._state.models.values()
            if other is not model and other.reserved
        ]

    def _choose_unloads(self, model: PooledModel, nbytes: BytesByDevice) -> set[str]:
        """Return the names of the models to unload so that one more of `nbytes` fits. Raises
        UserError if it never fits.
        """
        unloads = choose_unloads(self._residents(model), nbytes, self._state.limits)
        if unloads is None:
            raise self._too_large(model, nbytes)
        return {resident.name for resident in unloads}

    def _drain_for(self, model: PooledModel, names: Collection[str]) -> None:
        """Let the loaded models `names` end when they are idle, to make room for `model`, and let
        the others that drained for it answer again.
        """
        for other in self._state.models.values():
            if other.state != "loaded":
                continue
            if other.name in names:
                other.drains_for = other.drains_for or f"{ROOM_REASON}{model.name}"
            elif other.drains_for.startswith(ROOM_REASON):
                other.drains_for = ""
                if self._state.is_usable(other):
                    self._state.grant(other)

    def _pinned_bytes(self, model: PooledModel, device: str) -> int:
        """Return the bytes of the pinned models besides `model` on a device."""
        return sum(
            other.reserved.get(device, 0)
            for other in self._state.models.values()
            if other is not model and other.served.is_pinned
        )

    def _too_large(self, model: PooledModel, nbytes: BytesByDevice) -> UserError:
        """Return the error for a model that does not fit beside the pinned ones."""
        free, limits = self.free_beside_pinned(model), self._state.limits
        device = next(name for name in nbytes if name in limits and nbytes[name] > free[name])
        needed, limit = nbytes[device], limits[device]
        pinned = limit - free[device]
        beside = f", of which pinned models take {format_size(pinned)}" if pinned else ""
        where = "" if device == HOST_DEVICE else f" on {device}"
        smaller = f'a smaller ctx_size in [serve."{model.name}"]'
        hint = f"--memory-limit {math.ceil((needed + pinned) / 1e6)}M, or {smaller}"
        if where:
            hint = f"fewer gpu_layers or {smaller}"
        return UserError(
            f"{model.name} needs {format_size(needed)}{where}, and all models together may take"
            f" {format_size(limit)}{beside}",
            hint=hint,
        )
