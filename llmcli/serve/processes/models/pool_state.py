"""What the parts of a pool of models share: the models, the bytes that count for them, and the event
that something has changed. Everything runs on one event loop.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from llmcli.runtime.binding.placement.devices import HOST_DEVICE
from llmcli.serve.processes.models.load_turns import LoadTurns
from llmcli.serve.processes.models.pooled_model import PooledModel
from llmcli.serve.processes.models.served_models import ServedModel


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """The settings of a pool.

    - `limit_bytes`: the most bytes of the host that all models together may take.
    - `keep_alive`: seconds for which an idle model stays loaded.
    - `default_name`: the model of requests that name none; None: they must name one.
    - `keys`: the API keys, which identify clients. Without keys, their addresses do.
    """

    limit_bytes: int
    keep_alive: float
    default_name: str | None = None
    keys: tuple[str, ...] = ()


class PoolState:
    """The state of a pool.

    - `note`: receives messages for the user.
    - `limits`: the most bytes that all models together may take, by device. A GPU is in it once the
      process of a model has reported its free memory, which counts as long as a model is on it.
    """

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        settings: PoolSettings,
        note: Callable[[str], None],
    ) -> None:
        self.models = {name: PooledModel(served) for name, served in models.items()}
        self.settings, self.note = settings, note
        self.limits = {HOST_DEVICE: settings.limit_bytes}
        self.turns = LoadTurns()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.is_stopping = False
        self._changed = asyncio.Event()

    def reserved_bytes(self, device: str = HOST_DEVICE) -> int:
        """Return the bytes that count for all processes together on a device."""
        return sum(model.reserved.get(device, 0) for model in self.models.values())

    def set_device_limits(self, free_bytes: Mapping[str, int]) -> None:
        """Set the limits of GPUs on which no model is. `free_bytes`: what is free on each."""
        for device, nbytes in free_bytes.items():
            if not self.reserved_bytes(device):
                self.limits[device] = nbytes

    def is_usable(self, model: PooledModel) -> bool:
        """Return whether a model takes requests now: not if its file was changed, or if its process
        ends.
        """
        if model.is_ready:
            self.check_file(model)
        return model.is_ready and model.process is not None and not model.process.is_lost

    def check_file(self, model: PooledModel) -> None:
        """Let a loaded model end when it is idle if its file is gone or was replaced."""
        if model.drains_for or model.state != "loaded":
            return
        stamp = model.served.stamp
        if stamp != model.stamp:
            what = "removed" if stamp is None else "replaced"
            self.note(f"the file of {model.name} was {what}: its process ends when it is idle")
            model.drains_for = f"a file that was {what}"

    def grant(self, model: PooledModel) -> None:
        """Give the process of a loaded model to requests that wait for it."""
        model.grant(self.turns.is_contended(model))

    def grant_usable(self) -> None:
        """Give the processes of all models that take requests to those that wait for them."""
        for model in self.models.values():
            if model.tickets and self.is_usable(model):
                self.grant(model)

    def keep_alive(self, model: PooledModel, requested: float | None = None) -> float:
        """Return for how many seconds a model stays loaded after a request that asks for
        `requested`.
        """
        if requested is not None:
            return requested
        own = model.served.keep_alive
        return self.settings.keep_alive if own is None else own

    def extend_use(self, model: PooledModel) -> None:
        """Let a model stay loaded for its time from now on."""
        model.last_used = time.monotonic()
        model.expires_at = model.last_used + self.keep_alive(model)

    def report_change(self) -> None:
        """Wake all that wait for next_change()."""
        self._changed.set()

    async def next_change(self) -> None:
        """Wait until something has happened to a model."""
        self._changed.clear()
        await self._changed.wait()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine as a task of the pool."""
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
