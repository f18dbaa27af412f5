"""Runs the model in a separate process, and restarts the process when it ends. The process runs
asgi_relay.run_model_process.

If a worker of `--rpc` is lost, llama.cpp aborts its process. Requests that were running get
UpstreamLost. Requests that wait for the restart get its error if it fails.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from llmcli.errors import UserError
from llmcli.serve.processes.asgi_relay import OpenModel, run_model_process
from llmcli.serve.processes.model_process import ModelProcess

# delays before a restart, by the number of restarts that have failed in a row
RESTART_DELAYS_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0)


class SupervisedProcess(ModelProcess):
    """A model process, as the front server's Upstream. Call start() first; all other methods are
    called on one event loop. `open_model`: opens the model in the process. `note`: receives
    messages for the user about restarts. `facts`: what the process reports about its model.
    """

    def __init__(self, open_model: OpenModel, note: Callable[[str], None]) -> None:
        super().__init__()
        self._open_model, self._note = open_model, note
        self._supervisor: asyncio.Task[None] | None = None
        self.facts: dict[str, Any] = {}

    def start(self) -> None:
        """Start the process, and wait until its model is open. Raises UserError with the error of
        the process if that fails.
        """
        process, link = self._spawn(run_model_process, self._open_model)
        frame = self._read_report(process, link, "ready")
        self._process, self._link, self.facts = process, link, frame[1]

    def supervise(self) -> None:
        """Start a task on the current event loop that reads the process's frames and restarts the
        process when it ends. If the task exists, do nothing.
        """
        if self._supervisor is None:
            self._supervisor = asyncio.create_task(self._supervise())

    def close(self) -> None:
        """End the process. Its running requests are lost."""
        if self._supervisor:
            self._supervisor.cancel()
        self._end()

    async def wait(self, seconds: float) -> str:
        """Wait until the model can answer requests. Return "", or after `seconds` the reason why it
        cannot.
        """
        self.supervise()
        # right after start(), the supervising task must run once to make the model available
        await asyncio.sleep(0)
        if not self._available.is_set():
            try:
                async with asyncio.timeout(seconds):
                    await self._available.wait()
            except TimeoutError:
                return self._reason
        return ""

    async def _supervise(self) -> None:
        """Read the process's frames, and restart the process when it ends, until this task is
        canceled.
        """
        failures = 0
        while True:
            if self._link is not None:
                failures = 0
                why_killed = await self._read_frames(self._link)
                self._fail_lost_calls(why_killed, await self._wait_for_exit())
                self._note(f"the model was lost: {self._reason}; restarting it")
            await asyncio.sleep(
                RESTART_DELAYS_SECONDS[min(failures, len(RESTART_DELAYS_SECONDS) - 1)]
            )
            failures += 1
            try:
                await asyncio.to_thread(self.start)
                self._note("the model is available again")
            # OSError: the system has no free process or file at the moment.
            except (UserError, OSError) as error:
                if str(error) != self._reason:
                    self._note(f"the model does not start: {error}")
                self._reason = str(error)
