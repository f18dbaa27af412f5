"""/read: adds a text file to the next message."""

from collections.abc import Iterable
from pathlib import Path

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands.base import ReplCommand
from llmcli.chat.paths import complete_path, parse_path
from llmcli.errors import UserError
from llmcli.text_input import decode_text, read_limited

# Hardly any text has more bytes per token. Only this many bytes per token of the context are read
# of a file, because a longer file cannot fit.
MAX_BYTES_PER_TOKEN = 16


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
    count = _count_tokens(chat, text, path)
    chat.attachments.append(text)
    if question:
        ask_and_print(chat, chat.with_attachments(question))
    else:
        chat.ui.text(f"{path.name}: {count} tokens, sent with the next message")


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
    max_bytes = MAX_BYTES_PER_TOKEN * chat.runner.n_ctx
    raw = read_limited(
        path,
        max_bytes,
        hint="Tab after /read completes the name",
        special_file_hint="copy its text into a file",
        folder_hint="give one file in it",
    )
    if len(raw) > max_bytes:
        count = len(chat.runner.encode_text(raw.decode("utf-8", "replace")))
        raise UserError(
            f"the first {max_bytes:,} bytes of {path} alone are {count} tokens, "
            f"but the context holds {chat.runner.n_ctx}",
            hint="use a part of it: head -c 20000 FILE > part.txt",
        )
    return decode_text(raw, str(path), path=path)


def _count_tokens(chat: ChatSession, text: str, path: Path) -> int:
    """Return the number of tokens of `text`, the attachment made from the file at `path`. Raises
    UserError if it does not fit into the context together with the files that are attached already.
    """
    count = len(chat.runner.encode_text(text))
    n_attached = sum(len(chat.runner.encode_text(attachment)) for attachment in chat.attachments)
    if count + n_attached >= chat.runner.n_ctx:
        remark = f", and waiting files have {n_attached}" if n_attached else ""
        raise UserError(
            f"{path} has {count} tokens{remark}, but the context holds {chat.runner.n_ctx}",
            hint="use a part of it, or start with a larger --ctx-size",
        )
    return count


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
