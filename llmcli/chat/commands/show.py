"""/show: prints facts about the model file, and the current settings."""

from collections.abc import Iterable

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands.base import ReplCommand
from llmcli.chat.commands.system import print_all_settings, print_system
from llmcli.errors import UserError
from quant.gguf.header import GgufArray

LICENSE_KEYS = ("license", "license.name", "license.link")


def show_model(chat: ChatSession, argument: str) -> None:
    """Show the model and the current settings.

    As in ollama, a word shows only one section: `/show info` the file's metadata, `template` its
    chat template, `parameters` the settings, `license` its license, and `system` the system text.
    """
    section = argument.lower()
    if section == "":
        _print_summary(chat)
        print_all_settings(chat)
    elif section in SECTIONS:
        SECTIONS[section](chat)
    else:
        raise UserError(
            f"/show has no part {argument!r}", hint=f"/show takes one of: {' '.join(SECTIONS)}"
        )


def _print_summary(chat: ChatSession) -> None:
    """Print a table of the most important facts about the model and the conversation."""
    rows = [
        *chat.model.summary_rows(chat.name),
        ("system", chat.conversation.system or "-"),
        ("turns", str(len(chat.conversation.tree.current_path()))),
    ]
    chat.ui.table(("", ""), rows)


def _print_metadata(chat: ChatSession) -> None:
    """Print the metadata of the model file. Of arrays, such as the vocabulary, print only the
    length.
    """
    header = chat.runner.header
    rows = [
        ("file", str(header.path)),
        ("type", header.file_type),
        ("tensors", f"{len(header.tensors):,}"),
    ]
    for field in header.fields:
        if (
            field.key.removeprefix("general.") not in LICENSE_KEYS
            and field.key != "tokenizer.chat_template"
        ):
            value = field.value
            text = f"{value.count:,} values" if isinstance(value, GgufArray) else str(value)
            rows.append((field.key, " ".join(text.split())))
    chat.ui.table(("", ""), rows)


def _print_template(chat: ChatSession) -> None:
    template = chat.runner.template
    chat.ui.text(template.source if template else "no template: messages are plain text")


def _print_license(chat: ChatSession) -> None:
    metadata = chat.runner.header.metadata
    texts = [str(metadata[key]) for name in LICENSE_KEYS if (key := f"general.{name}") in metadata]
    chat.ui.text("\n".join(texts) or "the file does not name its license")


# The words that /show takes, and the functions that print these sections.
SECTIONS = {
    "info": _print_metadata,
    "template": _print_template,
    "parameters": print_all_settings,
    "license": _print_license,
    "system": print_system,
}


def _section_names(chat: ChatSession) -> Iterable[str]:
    return SECTIONS


COMMANDS = (
    ReplCommand(
        "show",
        show_model,
        "[info|template|parameters|license|system]",
        first_completions=_section_names,
        group="model and settings",
    ),
)
