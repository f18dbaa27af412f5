"""`serve` where the model is in other processes: one that is started again when llama.cpp ends it (--rpc)."""

from contextlib import closing
from functools import partial
from socket import socket as Socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmcli.commands.serve import Wish
    from llmcli.serve.settings import Settings


def run(wish: "Wish", socket: Socket) -> str:
    """Serve until a signal comes; its name. Raises UserError where the model does not open the first time."""
    from llmcli.commands.serve import opened, tell
    from llmcli.serve import server
    from llmcli.serve.child import Child
    from llmcli.serve.front import Front

    with closing(Child(partial(opened, wish), wish.ui.note)) as child:
        child.start()
        settings = _settings(wish, child.facts)

        def ready() -> None:
            child.keep()
            tell(settings, child.facts["n_ctx"], wish.parallel, wish.ui)

        return server.run(Front(child, settings), settings, socket, ready)


def _settings(wish: "Wish", facts: dict[str, Any]) -> "Settings":
    """What the front needs: where it listens, what it takes, and the names that the model's process told."""
    from llmcli.serve.settings import Settings

    return Settings(**{**wish.settings, "names": tuple(facts["names"])})
