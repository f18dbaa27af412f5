"""Tab completion of a typed line: command names, then each command's arguments."""

from collections.abc import Iterator

from llmcli.chat import commands
from llmcli.chat.chat_session import ChatSession
from llmcli.chat.settings.base import Completion


def complete_line(chat: ChatSession, line: str) -> Iterator[tuple[int, str]]:
    """Yield completions as (start, word): `word` replaces the text from `start` to the end of the
    line.

    `start` is relative to the end of the line, at most 0.
    """
    if not line.startswith("/") or line.startswith("//") or "\n" in line:
        return
    *before, typed = line[1:].split(" ")
    words = [word for word in before if word]
    if not before:
        completions: list[str] = [
            Completion(word, command.help) for word, command in commands.commands_by_word().items()
        ]
    elif not words or not (command := commands.commands_by_word().get(words[0].lower())):
        return
    elif command.line_completions:
        _, _, argument = line.lstrip("/").partition(" ")
        yield from (
            (-len(argument), completed) for completed in command.line_completions(chat, argument)
        )
        return
    else:
        completions = list(
            command.first_completions(chat)
            if len(words) == 1
            else command.later_completions(chat, words[1:])
        )
    for offer in completions:
        if offer.startswith(typed):
            yield -len(typed), offer
