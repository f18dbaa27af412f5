"""/model: continues the conversation with another model."""

from collections.abc import Iterable

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands.base import ReplCommand


def change_model(chat: ChatSession, argument: str) -> None:
    """Change the model; without an argument, show the current one.

    REF is what `llmcli chat` takes: a catalog name, org/repo[:QUANT] or a file. The conversation,
    the system text and the settings stay. Settings that you did not change get the defaults of the
    new model. The next message computes the complete conversation with the template of the new
    model. If the new model cannot be opened, the old one stays. With `llmcli chat --server`, REF is
    the name of a model of the server.
    """
    if not argument:
        chat.ui.text(f"{chat.name} ({chat.model.location})")
        return
    chat.model.switch(chat, argument)
    chat.ui.text(chat.model.describe(chat.name))


def _model_names(chat: ChatSession) -> Iterable[str]:
    return chat.model.list_names(chat)


COMMANDS = (
    ReplCommand(
        "model", change_model, "[REF]", first_completions=_model_names, group="model and settings"
    ),
)
