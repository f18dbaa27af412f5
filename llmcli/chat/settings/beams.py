"""The settings of beam search. The number of beams is limited by the number of sequences with which
the context was created.
"""

from collections.abc import Iterable

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.settings.base import SEARCH_GROUP, ChatSetting
from llmcli.errors import UserError
from llmcli.runtime.requests.beam_settings import EARLY_STOPPING_MODES, HELP


def _chat_setting(name: str) -> ChatSetting:
    """Return the chat setting for the field `name` of BeamSettings."""
    default, limits, meaning = HELP[name]

    def show(chat: ChatSession) -> str:
        value = chat.conversation.search.as_dict()[name]
        return value if isinstance(value, str) else f"{value:.10g}"

    def change(chat: ChatSession, value: str) -> None:
        search, max_beams = (
            chat.conversation.search.with_values({name: value}),
            chat.runner.context.n_seq_max,
        )
        if search.beams > max_beams:
            raise UserError(
                f"{search.beams} beams are too many: this model was loaded for {max_beams}",
                hint=f"leave, and start with --beams {search.beams}",
            )
        chat.conversation.search = search

    def values(chat: ChatSession) -> Iterable[str]:
        if name == "early_stopping":
            return EARLY_STOPPING_MODES
        return (
            [str(count) for count in range(1, chat.runner.context.n_seq_max + 1)]
            if name == "beams"
            else [default]
        )

    return ChatSetting(name, SEARCH_GROUP, meaning, limits, default, show, change, values)


SETTINGS = tuple(_chat_setting(name) for name in HELP)
