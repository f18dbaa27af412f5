"""/model: change the model within the conversation."""

from collections.abc import Iterable

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands.base import ReplCommand
from llmcli.errors import UserError
from llmcli.model_loader.opened_model import OpenedModel
from llmcli.runtime.sampling import find_setting, sampling_settings


def change_model(chat: ChatSession, argument: str) -> None:
    """Change the model; without an argument, show the current one.

    REF is what `llmcli chat` takes: a catalog name, org/repo[:QUANT] or a file. The conversation,
    the system text and the settings stay; the new model's defaults apply to settings that you did
    not change. The next message computes the whole conversation with the new model's template. If
    the new model cannot be opened, the old one stays.
    """
    if not argument:
        chat.ui.text(f"{chat.name} ({chat.runner.header.path})")
        return
    if chat.models is None:
        raise UserError(
            "the model cannot be changed here", hint="leave, and start with the other model"
        )
    chat.models.switch(
        argument, chat.conversation.search.beams, lambda opened: _use_model(chat, opened)
    )
    header = chat.runner.header
    chat.ui.text(f"{chat.name} · {header.file_type} · {chat.runner.n_ctx} tokens of context")
    _warn_if_too_long(chat)


def _use_model(chat: ChatSession, opened: OpenedModel) -> None:
    conversation = chat.conversation
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
    # Nothing below can fail, so the session never mixes the state of two models.
    conversation.sampling, conversation.system = sampling, conversation.system or opened.system
    chat.name, chat.runner, chat.file_bytes = opened.name, opened.runner, opened.file_bytes


def _warn_if_too_long(chat: ChatSession) -> None:
    """Warn if the conversation does not fit the new model's context."""
    if not chat.conversation.messages:
        return
    try:
        count = len(chat.prompt_tokens(""))
    except UserError as error:  # a template that rejects this conversation
        chat.ui.warn(str(error))
        return
    if count >= chat.runner.n_ctx:
        chat.ui.warn(
            f"the conversation has {count} tokens, but this context holds "
            f"{chat.runner.n_ctx}: /clear starts over"
        )


def _names(chat: ChatSession) -> Iterable[str]:
    return chat.models.list_names() if chat.models else ()


COMMANDS = (
    ReplCommand(
        "model", change_model, "[REF]", first_completions=_names, group="model and settings"
    ),
)
