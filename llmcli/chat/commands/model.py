"""/model: another model in the middle of the conversation."""

from collections.abc import Iterable

from llmcli.chat.chat_session import Talk
from llmcli.chat.commands.base import Command
from llmcli.errors import UserError
from llmcli.model_loader.opened_model import Opened
from llmcli.runtime.sampling import find, settings


def change_model(talk: Talk, rest: str) -> None:
    """Go on with another model; alone, tell which one answers.

    Takes what `llmcli chat` takes: a catalog name, org/repo[:QUANT], a file. The conversation, the
    system text and the settings stay; what the new name brings along fills in what was not set. The
    next message computes the conversation anew, with the new model's template. If the model cannot
    be had, the old one goes on.
    """
    if not rest:
        talk.ui.text(f"{talk.name} ({talk.runner.header.path})")
        return
    if talk.models is None:
        raise UserError(
            "there is no other model to be had here", hint="leave, and start with the other one"
        )
    talk.models.change(rest, talk.session.search.beams, lambda opened: _take(talk, opened))
    header = talk.runner.header
    talk.ui.text(f"{talk.name} · {header.file_type} · {talk.runner.n_ctx} tokens of context")
    _tell_length(talk)


def _take(talk: Talk, opened: Opened) -> None:
    session = talk.session
    sampling = session.sampling
    if sampling["logit_bias"]:
        sampling = sampling.with_values({"logit_bias": ()})
        talk.ui.warn("logit_bias is empty again: its token ids were the other model's")
    unset = {
        setting.name for setting in settings().values() if sampling[setting.name] == setting.default
    }
    brought = {name: value for name, value in opened.settings.items() if find(name).name in unset}
    sampling = sampling.with_values(brought)
    # From here on nothing can fail: all of it is the new model's, or all the old one's.
    session.sampling, session.system = sampling, session.system or opened.system
    talk.name, talk.runner, talk.file_bytes = opened.name, opened.runner, opened.file_bytes


def _tell_length(talk: Talk) -> None:
    """Say beforehand where the conversation does not fit the new model's context."""
    if not talk.session.messages:
        return
    try:
        count = len(talk.tokens(""))
    except UserError as error:  # a template that refuses this conversation
        talk.ui.warn(str(error))
        return
    if count >= talk.runner.n_ctx:
        talk.ui.warn(
            f"the conversation has {count} tokens, this context holds {talk.runner.n_ctx}: /clear begins anew"
        )


def _names(talk: Talk) -> Iterable[str]:
    return talk.models.names() if talk.models else ()


COMMANDS = (
    Command("model", change_model, "[REF]", completions=_names, group="model and settings"),
)
