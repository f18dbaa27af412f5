"""/model: continues the conversation with another model."""

from collections.abc import Iterable

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands.base import ReplCommand
from llmcli.errors import UserError
from llmcli.model_loader.opened_model import OpenedModel
from llmcli.runtime.sampling import find_setting, sampling_settings


def change_model(chat: ChatSession, argument: str) -> None:
    """Change the model; without an argument, show the current one.

    REF is what `llmcli chat` takes: a catalog name, org/repo[:QUANT] or a file. The conversation,
    the system text and the settings stay. Settings that you did not change get the defaults of the
    new model. The next message computes the complete conversation with the template of the new
    model. If the new model cannot be opened, the old one stays.
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
    """Make `opened` the model of the session. Settings with default values get the new model's
    recommended values, and logit_bias is reset, because token ids differ between models.
    """
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
    # Nothing after this line can fail, so that the session never has the state of two models.
    conversation.sampling, conversation.system = sampling, conversation.system or opened.system
    chat.name, chat.runner, chat.file_bytes = opened.name, opened.runner, opened.file_bytes
    chat.model_sha256 = opened.sha256


def _warn_if_too_long(chat: ChatSession) -> None:
    """Print a warning if the conversation does not fit into the context of the new model, or if
    its template cannot render the conversation.
    """
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


def _model_names(chat: ChatSession) -> Iterable[str]:
    return chat.models.list_names() if chat.models else ()


COMMANDS = (
    ReplCommand(
        "model", change_model, "[REF]", first_completions=_model_names, group="model and settings"
    ),
)
