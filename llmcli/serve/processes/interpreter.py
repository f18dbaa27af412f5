"""The interpreters in which model processes run.

On Linux, multiprocessing's fork server starts them: a process that has imported the modules below,
and forks for each model process. A model is thus loaded without the imports, which take longer than
to map a small model's file. llmcli never starts a thread of llama.cpp in the fork server, because
these threads do not survive a fork. Elsewhere each model process is a new interpreter, because the
libraries of macOS do not survive one.
"""

import multiprocessing
import sys
from multiprocessing.context import ForkServerContext, SpawnContext

IMPORTED_MODULES = (
    "llmcli.serve.processes.asgi_relay",
    "llmcli.serve.launch",
    "llmcli.model_loader.open_server_model",
)


def start_fork_server() -> ForkServerContext | SpawnContext:
    """Start the fork server if none runs, without waiting for its imports. Return the context that
    starts model processes: a plain one if there can be no fork server, which needs a temporary
    folder with a short name for its socket.
    """
    plain = multiprocessing.get_context("spawn")
    if sys.platform != "linux":
        return plain
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED_MODULES))
    try:
        forkserver.ensure_running()
    except OSError:
        return plain
    return context
