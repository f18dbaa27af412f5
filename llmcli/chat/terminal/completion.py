"""Tab completion of a typed line: command names, then each command's arguments."""

from collections.abc import Iterator

from llmcli.chat import commands
from llmcli.chat.chat_session import Talk
from llmcli.chat.settings.base import Offer


def offers(chat: Talk, line: str) -> Iterator[tuple[int, str]]:
    """Yield completions in order, as (start relative to the line's end, at most 0; the word)."""
    if not line.startswith("/") or line.startswith("//") or "\n" in line:
        return
    *before, typed = line[1:].split(" ")
    words = [word for word in before if word]
    if not before:
        completions: list[str] = [
            Offer(word, command.help) for word, command in commands.words().items()
        ]
    elif not words or not (command := commands.words().get(words[0].lower())):
        return
    elif command.endings:
        _, _, rest = line.lstrip("/").partition(" ")
        yield from ((-len(rest), completed) for completed in command.endings(chat, rest))
        return
    else:
        completions = list(
            command.completions(chat) if len(words) == 1 else command.further(chat, words[1:])
        )
    for offer in completions:
        if offer.startswith(typed):
            yield -len(typed), offer
