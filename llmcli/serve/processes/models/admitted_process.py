"""A model process that first reports how much memory it will take, and loads the model when the
server admits it. The process runs asgi_relay.run_admitted_process. It is not restarted.
"""

import asyncio
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from llmcli.model_loader.earlier_load import EarlierLoad
from llmcli.model_loader.planned_memory import PlannedMemory
from llmcli.runtime.drafting.gain.pass_cost import MeasuredPasses
from llmcli.serve.processes.asgi_relay import OpenPlanned, encode_frame, run_admitted_process
from llmcli.serve.processes.interpreter import ChildProcess
from llmcli.serve.processes.model_process import ModelProcess


class AdmittedProcess(ModelProcess):
    """A process of one model. `predict`: returns the fields of PlannedMemory in the process.
    `open_model`: opens the model in the process, with the context of that plan. `facts`: what the
    process reports about its loaded model.
    """

    def __init__(self, predict: Callable[[], dict[str, Any]], open_model: OpenPlanned) -> None:
        super().__init__()
        self._predict, self._open_model = predict, open_model
        self.facts: dict[str, Any] = {}
        self._was_available = self._is_aborted = False

    def plan(self, limits: Mapping[str, int]) -> PlannedMemory:
        """Start the process, and return what the model will take. `limits`: the most bytes that it
        may take, by device. Waits. Raises UserError if no setting of the model fits, or if it cannot
        be read.
        """
        process, link = self._start(limits, None)
        return PlannedMemory(**self._read_report(process, link, "planned")[1])

    def start(self, limits: Mapping[str, int], earlier: EarlierLoad) -> None:
        """Start the process without a plan. `limits`, `earlier`: those of an earlier plan, and what
        it has found. Waits. Raises UserError if the process cannot be started.
        """
        self._start(limits, earlier)

    def _start(
        self, limits: Mapping[str, int], earlier: EarlierLoad | None
    ) -> tuple[ChildProcess, socket.socket]:
        process, link = self._spawn(
            run_admitted_process, self._predict, self._open_model, dict(limits), earlier
        )
        self._process, self._link = process, link
        if self._is_aborted:  # while the process was started
            process.kill()
        return process, link

    @property
    def measured_passes(self) -> MeasuredPasses | None:
        """The passes that the loaded model has measured, if it has."""
        passes = self.facts.get("passes")
        return MeasuredPasses(**passes) if passes else None

    def load(self, limit_bytes: int) -> None:
        """Load the model into at most `limit_bytes` of the host. Waits. Raises UserError if that
        fails.
        """
        assert self._link is not None and self._process is not None
        with suppress(OSError):  # if the process has ended, reading fails, too
            self._link.sendall(encode_frame(("load", limit_bytes)))
        self.facts = self._read_report(self._process, self._link, "ready")[1]

    @property
    def is_lost(self) -> bool:
        """Whether the process has ended, or takes no more requests because it ends."""
        return self._was_available and not self._available.is_set()

    async def wait_until_available(self) -> None:
        """Wait until serve(), which must run in another task, passes requests on."""
        await self._available.wait()
        self._was_available = True

    async def serve(self) -> str:
        """Pass requests and answers on until the process has ended, and return why it ended. All
        its requests are then lost.
        """
        assert self._link is not None
        why_killed = await self._read_frames(self._link)
        self._fail_lost_calls(why_killed, await self._wait_for_exit())
        return self._reason

    def abort(self) -> None:
        """Kill the process while it starts, so that plan() or load() fails."""
        self._is_aborted = True
        if self._process is not None:
            self._process.kill()

    async def close(self) -> None:
        """End the process, and wait until its memory is free."""
        if self._writer is not None:
            self._writer.close()
        elif self._link is not None:
            self._link.close()
        if self._process is not None:
            await asyncio.to_thread(self._end_process, self._process)
