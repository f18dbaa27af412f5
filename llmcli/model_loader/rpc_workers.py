"""Apply `--rpc`, which places parts of a model on the devices of other machines (RPC workers).

When a worker is lost, llmcli prints an error and ends. llama.cpp would abort the process, and the
answer that it was computing cannot be recovered. For this reason `serve` runs its model in a
separate process.
"""

import os
import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from llmcli import terminal_mode

if TYPE_CHECKING:
    from llmcli.ui import UI

RESTORE_CURSOR = "\x1b[0m\x1b[?25h\n"  # normal style, visible cursor, new line


def join_workers(rpc: str | None, ui: "UI") -> None:
    """Register the workers at the addresses `rpc` before any model is opened. From then on, the
    loss of a worker ends the program with an error. Do nothing for None. Raises UserError if a
    worker cannot be used.
    """
    if rpc is None:
        return
    from llmcli.hardware import rpc_workers
    from llmcli.runtime.binding.placement.rpc import on_worker_loss

    rpc_workers.add_workers(rpc_workers.parse_endpoints(rpc))
    on_worker_loss(partial(_exit_for_lost_worker, terminal_mode.read_mode(), ui))


def _exit_for_lost_worker(terminal_settings: list[Any] | None, ui: "UI") -> None:
    """Print which worker was lost, and exit at once. An exception would not help, because the
    thread that waits in llama.cpp for the worker's answer cannot be woken.

    The terminal settings are restored first, because the prompt of a chat may have turned off echo
    or hidden the cursor.
    """
    from llmcli.hardware import rpc_workers
    from llmcli.runtime.binding.placement.rpc import joined_workers

    addresses = list(joined_workers())
    where = " and ".join(rpc_workers.unreachable_workers(addresses) or addresses)
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        if terminal_settings is not None:
            terminal_mode.restore_mode(terminal_settings)
        if sys.stderr.isatty():
            sys.stderr.write(RESTORE_CURSOR)
        ui.error(
            f"lost a worker: {where}",
            hint="restart the worker there (llmcli worker --rpc), then run the command again; "
            "a chat resumes with --resume",
        )
        sys.stderr.flush()
    os._exit(1)
