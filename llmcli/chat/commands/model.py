"""/model: change the model within the conversation."""

from collections.abc import Iterable

from llmcli.chat.chat_session import Talk
from llmcli.chat.commands.base import Command
from llmcli.errors import UserError
from llmcli.model_loader.opened_model import Opened
from llmcli.runtime.sampling import find_setting, sampling_settings


def change_model(chat: Talk, rest: str) -> None:
    """Change the model; without an argument, show the current one.

    REF is what `llmcli chat` takes: a catalog name, org/repo[:QUANT] or a file. The conversation,
    the system text and the settings stay; the new model's defaults apply to settings that you did
    not change. The next message computes the whole conversation with the new model's template. If
    the new model cannot be opened, the old one stays.
    """
    if not rest:
        chat.ui.text(f"{chat.name} ({chat.runner.header.path})")
        return
    if chat.models is None:
        raise UserError(
            "the model cannot be changed here", hint="leave, and start with the other model"
        )
    chat.models.switch(rest, chat.session.search.beams, lambda opened: _take(chat, opened))
    header = chat.runner.header
    chat.ui.text(f"{chat.name} · {header.file_type} · {chat.runner.n_ctx} tokens of context")
    _tell_length(chat)


def _take(chat: Talk, opened: Opened) -> None:
    conversation = chat.session
    sampling = conversation.sampling
    if sampling["logit_bias"]:
        sampling = sampling.with_values({"logit_bias": ()})
        chat.ui.warn("logit_bias was reset: its token ids belong to the other model")
    unset = {
        setting.name
        for setting in sampling_settings().values()
        if sampling[setting.name] == setting.default
    }
    new_defaults = {
        name: value for name, value in opened.settings.items() if find_setting(name).name in unset
    }
    sampling = sampling.with_values(new_defaults)
    # Nothing below can fail, so the state is never mixed from two models.
    conversation.sampling, conversation.system = sampling, conversation.system or opened.system
    chat.name, chat.runner, chat.file_bytes = opened.name, opened.runner, opened.file_bytes


def _tell_length(chat: Talk) -> None:
    """Warn if the conversation does not fit the new model's context."""
    if not chat.session.messages:
        return
    try:
        count = len(chat.tokens(""))
    except UserError as error:  # a template that rejects this conversation
        chat.ui.warn(str(error))
        return
    if count >= chat.runner.n_ctx:
        chat.ui.warn(
            f"the conversation has {count} tokens, but this context holds "
            f"{chat.runner.n_ctx}: /clear starts over"
        )


def _names(chat: Talk) -> Iterable[str]:
    return chat.models.names() if chat.models else ()


COMMANDS = (
    Command("model", change_model, "[REF]", completions=_names, group="model and settings"),
)
