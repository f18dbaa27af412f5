"""Tab completion of a typed line: the names of commands, and the arguments of each command."""

from collections.abc import Iterator

from llmcli.chat import commands
from llmcli.chat.chat_session import ChatSession
from llmcli.chat.settings.base import Completion


def complete_line(chat: ChatSession, line: str) -> Iterator[tuple[int, str]]:
    """Yield the completions of a line as pairs (start, word). `word` replaces the end of the line
    from position len(line) + `start`, where `start` is 0 or negative.
    """
    if not line.startswith("/") or line.startswith("//") or "\n" in line:
        return
    *complete_words, typed = line[1:].split(" ")
    words = [word for word in complete_words if word]
    if not complete_words:
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
