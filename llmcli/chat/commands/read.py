"""/read: adds a text file to the next message."""

from collections.abc import Iterable
from pathlib import Path

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands.base import ReplCommand
from llmcli.chat.paths import complete_path, parse_path
from llmcli.errors import UserError
from llmcli.text_input import decode_text, read_limited
from llmcli.units import format_count

# Hardly any text has more bytes per token. Only this many bytes per token of the context are read
# of a file, because a longer file cannot fit.
MAX_BYTES_PER_TOKEN = 16
MAX_BYTES = 1 << 24  # of a file, however long the context is


def read_file(chat: ChatSession, argument: str) -> None:
    """Add a text file to the next message; with a question, ask about it.

    `/read notes.txt` keeps the file for your next message; `/read notes.txt What is it about?` asks
    at once. Quote names with spaces. Several files can go with one message: `/read` lists the
    waiting files, and `/read -` drops them. The text is sent after a line `--- File: NAME ---`, as
    in llama.cpp.
    """
    from llmcli.chat.ask import ask_and_print

    if not argument:
        chat.ui.text(
            "\n".join(_heading(text) for text in chat.attachments)
            or "no files wait for the next message"
        )
        return
    if argument == "-":
        chat.attachments.clear()
        chat.ui.text("no files wait for the next message")
        return
    file_name, question = _split_line(argument)
    path = parse_path(file_name)
    text = f"--- File: {path.name} ---\n{_read_text(path, chat)}"
    size = _measure(chat, text, path)
    chat.attachments.append(text)
    if question:
        ask_and_print(chat, chat.with_attachments(question))
    else:
        chat.ui.text(f"{path.name}: {size}, sent with the next message")


def _split_line(argument: str) -> tuple[str, str]:
    """Split the command's argument into a file name and a question. The file name is in quotes or
    ends at the first space. If no such file exists, but the complete argument is the name of a
    file, the question is empty.
    """
    if argument[0] in "'\"" and (end := argument.find(argument[0], 1)) > 0:
        return argument[: end + 1], argument[end + 1 :].strip()
    file_name, _, question = argument.partition(" ")
    if question and not parse_path(file_name).exists() and parse_path(argument).is_file():
        return argument, ""
    return file_name, question.strip()


def _read_text(path: Path, chat: ChatSession) -> str:
    """Return the text of a file. Raises UserError if the file cannot be read, is not UTF-8, or is
    too long for the context.
    """
    n_ctx = chat.model.n_ctx
    max_bytes = MAX_BYTES if n_ctx is None else min(MAX_BYTES, MAX_BYTES_PER_TOKEN * n_ctx)
    raw = read_limited(
        path,
        max_bytes,
        hint="Tab after /read completes the name",
        special_file_hint="copy its text into a file",
        folder_hint="give one file in it",
    )
    if len(raw) > max_bytes:
        raise UserError(
            _describe_excess(path, raw, max_bytes, chat),
            hint="use a part of it: head -c 20000 FILE > part.txt",
        )
    return decode_text(raw, str(path), path=path)


def _describe_excess(path: Path, raw: bytes, max_bytes: int, chat: ChatSession) -> str:
    """Return the message about a file that is too long. `raw`: what was read of it, which is more
    than `max_bytes`.
    """
    if not chat.model.has_tokenizer:
        return f"{path} has more than the {max_bytes:,} bytes that can be sent"
    count = chat.model.count_text(raw.decode("utf-8", "replace"))
    return (
        f"the first {max_bytes:,} bytes of {path} alone are {count} tokens, "
        f"but the context holds {chat.model.n_ctx}"
    )


def _measure(chat: ChatSession, text: str, path: Path) -> str:
    """Return the size of `text`, the attachment made from the file at `path`: its number of tokens,
    or of characters if the tokenizer is on a server. Raises UserError if it does not fit into the
    context together with the files that are attached already.
    """
    if not chat.model.has_tokenizer:
        return format_count(len(text), "character")
    count, n_ctx = chat.model.count_text(text), chat.runner.n_ctx
    n_attached = sum(chat.model.count_text(attachment) for attachment in chat.attachments)
    if count + n_attached >= n_ctx:
        remark = f", and waiting files have {n_attached}" if n_attached else ""
        raise UserError(
            f"{path} has {count} tokens{remark}, but the context holds {n_ctx}",
            hint="use a part of it, or start with a larger --ctx-size",
        )
    return f"{count} tokens"


def _heading(text: str) -> str:
    """Return the first line of an attachment, which contains the name of its file."""
    return text.split("\n", 1)[0]


def _complete_argument(chat: ChatSession, typed: str) -> Iterable[str]:
    return complete_path(typed)


COMMANDS = (
    ReplCommand(
        "read", read_file, "[FILE [QUESTION]]", line_completions=_complete_argument, group="files"
    ),
)
