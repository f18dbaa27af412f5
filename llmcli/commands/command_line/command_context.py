"""The configuration and the user interface of one command."""

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.ui import UI


def start_command(
    json: bool = False, offline: bool = False, allow_pickle: bool = False, trust: bool = False
) -> "tuple[Config, UI]":
    """Return the configuration and the user interface of one command. `json`: print one JSON
    document on stdout. `offline`, `allow_pickle`, `trust`: override the configuration.
    """
    from llmcli import config
    from llmcli.ui import UI

    loaded = config.load_config()
    loaded = replace(
        loaded,
        offline=loaded.offline or offline,
        allow_pickle=allow_pickle,
        trust_files=loaded.trust_files or trust,
    )
    return loaded, UI(json=json, color=loaded.color)
