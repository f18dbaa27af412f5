"""Apply `--rpc` and `--tensor-split`, which place parts of a model on the devices of other machines
(RPC workers).

When a worker is lost, llmcli prints an error and ends. llama.cpp would abort the process, and the
answer that it was computing cannot be recovered. For this reason `serve` runs its model in a
separate process.
"""

import math
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from llmcli import terminal_mode
from llmcli.errors import UsageError, UserError

if TYPE_CHECKING:
    from llmcli.ui import UI

RESTORE_CURSOR = "\x1b[0m\x1b[?25h\n"  # normal style, visible cursor, new line


@dataclass(frozen=True, slots=True)
class RpcWorkers:
    """The values of --rpc and --tensor-split of a command. None: not typed."""

    rpc: str | None = None  # addresses of workers, such as "host:port,host:port"
    tensor_split: str | None = None  # share of the model for each device, such as "3,1"

    def join(self, ui: "UI", runs_model: bool = True) -> tuple[float, ...]:
        """Register the workers, so that models loaded later use them. Return the proportions of the
        layers for each device, as RunOptions.tensor_split has them. `runs_model`: whether the
        command loads a model.

        Raises UserError if a worker cannot be used, and UsageError if an option was typed but the
        command loads no model.
        """
        if not runs_model and (self.rpc is not None or self.tensor_split is not None):
            raise UsageError(
                "--rpc and -ts have no effect: this command runs no model here",
                hint="leave out --rpc and -ts",
            )
        return join_workers(self.rpc, self.tensor_split, ui)


def join_workers(rpc: str | None, split: str | None, ui: "UI") -> tuple[float, ...]:
    """Register the workers at the addresses `rpc` before any model is opened. From then on, the
    loss of a worker ends the program with an error. Return the proportions `split` as numbers;
    empty for None. Do nothing if both are None.

    Raises UserError if a worker cannot be used, or for an invalid value.
    """
    if rpc is None and split is None:
        return ()
    from llmcli.hardware import rpc_workers
    from llmcli.runtime.binding.rpc import on_worker_loss

    addresses = rpc_workers.parse_endpoints(rpc) if rpc is not None else ()
    proportions = _parse_split(split)
    rpc_workers.add_workers(addresses)
    rpc_workers.check_tensor_split(proportions)
    if addresses:
        on_worker_loss(partial(_exit_for_lost_worker, terminal_mode.read_mode(), ui))
    return proportions


def _parse_split(text: str | None) -> tuple[float, ...]:
    """Return the proportions in a value of --tensor-split: (3.0, 1.0) for "3,1". Empty for None.
    Raises UserError for an invalid value.
    """
    if text is None:
        return ()
    try:
        proportions = tuple(float(number) for number in text.replace("/", ",").split(","))
    except ValueError:
        proportions = ()
    if (
        not proportions
        or not all(math.isfinite(proportion) and proportion >= 0 for proportion in proportions)
        or not any(proportions)
    ):
        raise UserError(f"--tensor-split is {text!r}", hint="-ts takes proportions, such as 3,1")
    return proportions


def _exit_for_lost_worker(terminal_settings: list[Any] | None, ui: "UI") -> None:
    """Print which worker was lost, and exit at once. An exception would not help, because the
    thread that waits in llama.cpp for the worker's answer cannot be woken.

    The terminal settings are restored first, because the prompt of a chat may have turned off echo
    or hidden the cursor.
    """
    from llmcli.hardware import rpc_workers
    from llmcli.runtime.binding.rpc import joined_workers

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
