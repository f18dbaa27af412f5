"""/read: a text file as part of the next message."""

from collections.abc import Iterable
from pathlib import Path

from llmcli.chat.chat_session import Talk
from llmcli.chat.commands.base import Command
from llmcli.chat.paths import endings, named
from llmcli.errors import UserError
from llmcli.text_input import decoded

# bytes a token that hardly a text has: what is longer for the whole context is not read to its end
LONG = 16


def read(talk: Talk, rest: str) -> None:
    """Read a text file into the next message; with a question, ask about it.

    `/read notes.txt` keeps the file for your next message, `/read notes.txt What is it about?` asks
    at once. A name with blanks stands in quotes. Several files go with one message; `/read` alone
    lists those that wait, and `/read -` lets go of them. The text is sent after a line `--- File:
    NAME ---`, as llama.cpp does.
    """
    from llmcli.chat.ask import answer

    if not rest:
        talk.ui.text(
            "\n".join(_heading(text) for text in talk.attached)
            or "no file waits for the next message"
        )
        return
    if rest == "-":
        talk.attached.clear()
        talk.ui.text("no file waits for the next message")
        return
    place, question = _parted(rest)
    path = named(place)
    text = f"--- File: {path.name} ---\n{_text(path, talk)}"
    count = _tokens(talk, text, path)
    talk.attached.append(text)
    if question:
        answer(talk, talk.message(question))
    else:
        talk.ui.text(f"{path.name}: {count} tokens, they go with the next message")


def _parted(rest: str) -> tuple[str, str]:
    """The file's name, quoted or up to the first blank, and the question after it.

    A line that names a file as a whole is no question.
    """
    if rest[0] in "'\"" and (end := rest.find(rest[0], 1)) > 0:
        return rest[: end + 1], rest[end + 1 :].strip()
    place, _, question = rest.partition(" ")
    if question and not named(place).exists() and named(rest).is_file():
        return rest, ""
    return place, question.strip()


def _text(path: Path, talk: Talk) -> str:
    most = LONG * talk.runner.n_ctx
    try:
        if path.is_dir():
            raise UserError(f"{path} is a folder", hint="name one file of it")
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is no ordinary file", hint="copy its text into one")
        with path.open("rb") as file:
            raw = file.read(most + 1)
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}", hint="Tab after /read completes the name"
        ) from None
    if len(raw) > most:
        count = len(talk.runner.encode_text(raw.decode("utf-8", "replace")))
        raise UserError(
            f"{path}: its first {most:,} bytes alone are {count} tokens, the context holds {talk.runner.n_ctx}",
            hint="take a part of it: head -c 20000 FILE > part.txt",
        )
    return decoded(raw, str(path)).removeprefix("\ufeff")


def _tokens(talk: Talk, text: str, path: Path) -> int:
    """How many tokens the file is; raises UserError where the context could not hold it and what
    waits already.
    """
    count = len(talk.runner.encode_text(text))
    waiting = sum(len(talk.runner.encode_text(one)) for one in talk.attached)
    if count + waiting >= talk.runner.n_ctx:
        others = f", {waiting} more wait" if waiting else ""
        raise UserError(
            f"{path} has {count} tokens{others}: the context holds {talk.runner.n_ctx}",
            hint="take a part of it, or start with a larger --ctx-size",
        )
    return count


def _heading(text: str) -> str:
    return text.split("\n", 1)[0]


def _endings(talk: Talk, typed: str) -> Iterable[str]:
    return endings(typed)


COMMANDS = (Command("read", read, "[FILE [QUESTION]]", endings=_endings, group="files"),)
