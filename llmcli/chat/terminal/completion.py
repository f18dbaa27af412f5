"""What Tab offers for a half typed line: command words, then what each command takes. Knows nothing
of keys.
"""

from collections.abc import Iterator

from llmcli.chat import commands
from llmcli.chat.chat_session import Talk
from llmcli.chat.settings.base import Offer


def offers(talk: Talk, line: str) -> Iterator[tuple[int, str]]:
    """(where it begins, counted back from the end of the line as a negative number; the word), in
    order.
    """
    if not line.startswith("/") or line.startswith("//") or "\n" in line:
        return
    *before, typed = line[1:].split(" ")
    words = [word for word in before if word]
    if not before:
        found: list[str] = [Offer(word, command.help) for word, command in commands.words().items()]
    elif not words or not (command := commands.words().get(words[0].lower())):
        return
    elif command.endings:
        _, _, rest = line.lstrip("/").partition(" ")
        yield from ((-len(rest), whole) for whole in command.endings(talk, rest))
        return
    else:
        found = list(
            command.completions(talk) if len(words) == 1 else command.further(talk, words[1:])
        )
    for offer in found:
        if offer.startswith(typed):
            yield -len(typed), offer
