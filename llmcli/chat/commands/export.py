"""/export: writes the conversation as a Markdown or JSON document."""

import json
from collections.abc import Iterable

from llmcli.atomic_files import write_atomically
from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands.base import ReplCommand
from llmcli.chat.paths import complete_path, parse_path
from llmcli.errors import UserError
from llmcli.types import Message
from llmcli.ui import escape_controls


def export_conversation(chat: ChatSession, argument: str) -> None:
    """Write the conversation as Markdown or JSON, to a file or to the terminal.

    `/export md` and `/export json` print it; `/export md FILE` writes it to FILE. Existing files
    are not replaced. JSON contains the exact text. In Markdown, control characters are replaced by
    visible symbols.
    """
    format_name, _, typed_path = argument.partition(" ")
    if format_name not in FORMATTERS:
        message = (
            f"unknown export format {format_name!r}" if format_name else "/export needs a format"
        )
        raise UserError(message, hint="type /export md or /export json, optionally with a file")
    text = FORMATTERS[format_name](chat)
    if not typed_path.strip():
        chat.ui.text(text)
        return
    path = parse_path(typed_path)
    if path.exists() or path.is_symlink():
        raise UserError(
            f"{path} already exists", hint=f"choose another name, or remove it: rm '{path}'"
        )
    if not path.parent.is_dir():
        raise UserError(
            f"no such folder: {path.parent}", hint=f"create it: mkdir -p '{path.parent}'"
        )
    # Only the user may read the file.
    write_atomically(path, (text + "\n").encode("utf-8", "replace"), mode=0o600)
    chat.ui.text(f"wrote {len(chat.conversation.tree.current_path())} turns to {path}")


def _format_markdown(chat: ChatSession) -> str:
    """Return the conversation as Markdown, with one heading for each message."""
    conversation = chat.conversation
    parts = [f"# A chat with {chat.name}"]
    if conversation.system:
        parts.append(f"## System\n\n{conversation.system}")
    for index, message in enumerate(conversation.messages):
        mark = "\n\n*(stopped here)*" if index in conversation.stopped_indices else ""
        is_result = message.role == "tool"
        content = _indent(message.content) if is_result else message.content.strip()
        body = "\n\n".join(filter(None, (content, *_describe_calls(message))))
        parts.append(f"## {message.role.capitalize()}\n\n{body}{mark}")
    return escape_controls("\n\n".join(parts))


def _describe_calls(message: Message) -> list[str]:
    """Return a code block for each call of tools in a message."""
    functions = [call["function"] for call in message.template_fields.get("tool_calls", ())]
    return [_indent(f"{function['name']}({function['arguments']})") for function in functions]


def _indent(text: str) -> str:
    """Return a text as a code block of Markdown, which nothing in the text can end."""
    return "\n".join(f"    {line}" for line in text.split("\n"))


def _format_json(chat: ChatSession) -> str:
    """Return the conversation as a JSON document. Control characters are written as JSON escapes,
    so that the document can be printed on a terminal safely and still contains the exact text.
    """
    conversation = chat.conversation
    head = [{"role": "system", "content": conversation.system}] if conversation.system else []
    messages = [
        {
            "role": message.role,
            "content": message.content,
            **message.template_fields,
            **({"cut": True} if index in conversation.stopped_indices else {}),
        }
        for index, message in enumerate(conversation.messages)
    ]
    document = {
        "model": chat.name,
        "settings": conversation.sampling.as_dict(),
        "messages": [*head, *messages],
    }
    text = json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False)
    return "".join(
        character
        if character == "\n" or escape_controls(character) == character
        else f"\\u{ord(character):04x}"
        for character in text
    )


FORMATTERS = {"md": _format_markdown, "json": _format_json}


def _complete_argument(chat: ChatSession, typed: str) -> Iterable[str]:
    """Return the completions of the text after /export: a format, then a path."""
    format_name, separator, typed_path = typed.partition(" ")
    if not separator:
        return [name for name in FORMATTERS if name.startswith(format_name)]
    return (
        [f"{format_name} {path}" for path in complete_path(typed_path)]
        if format_name in FORMATTERS
        else ()
    )


COMMANDS = (
    ReplCommand(
        "export",
        export_conversation,
        "md|json [FILE]",
        line_completions=_complete_argument,
        group="files",
    ),
)
