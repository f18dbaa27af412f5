"""The settings that the command `/set` changes. Each module of this folder exports a tuple
SETTINGS.
"""

import functools
from difflib import get_close_matches

from llmcli.chat.settings.base import ChatSetting
from llmcli.errors import UserError
from quant.registry import collect


@functools.cache
def chat_settings() -> dict[str, ChatSetting]:
    """Return all settings by name, in the order in which `/set` lists them."""
    table: dict[str, ChatSetting] = collect("llmcli.chat.settings", "SETTINGS")
    # The sort is stable, so the settings of one module stay in their order.
    return dict(sorted(table.items(), key=lambda item: item[1].group))


def find_setting(name: str) -> ChatSetting:
    """Return the setting with this name or alias. Upper case and hyphens are accepted. Raises
    UserError if there is none, with a hint at a similar name.
    """
    typed_name = name.strip().lower().replace("-", "_")
    for setting in chat_settings().values():
        if typed_name == setting.name or typed_name in setting.aliases:
            return setting
    near = get_close_matches(typed_name, chat_settings(), 1)
    names = ", ".join(chat_settings())
    raise UserError(
        f"no setting called {name!r}",
        hint=f"did you mean {near[0]}?" if near else f"the settings are: {names}",
    )
