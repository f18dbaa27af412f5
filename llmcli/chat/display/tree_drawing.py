"""The conversation's tree drawn as text: one line for each turn."""

from collections.abc import Iterator

from llmcli.chat.conversation.turn_tree import Tree
from llmcli.chat.display.styles import one_line

HERE, ELSEWHERE = "●", "○"
QUESTION, ANSWER = 24, 28  # characters shown of each


def rows(tree: Tree) -> list[tuple[str, str, str, str, str]]:
    """Return the rows of the /tree table: drawing and number, question, answer, tokens, remarks."""
    path = set(tree.path())
    branches: dict[int, list[str]] = {}
    for name, end in tree.names.items():
        branches.setdefault(end, []).append(name)
    table = []
    for lead, number in _lines(tree):
        turn = tree[number]
        remarks = ["cut"] * turn.cut + ["left the context"] * (number in tree.left)
        remarks += branches.get(number, [])
        remarks += ["<- here"] if number == tree.at else []
        table.append(
            (
                f"{lead}{HERE if number in path else ELSEWHERE} {number}",
                shortened(turn.question, QUESTION),
                shortened(turn.answer, ANSWER),
                f"{turn.tokens or '-'}",
                ", ".join(remarks),
            )
        )
    return table


def shortened(text: str, most: int) -> str:
    """Shorten a text to one line; an ellipsis marks that something is missing."""
    line = one_line(text[: most + 1])
    return line if len(line) <= most else line[: most - 1] + "…"


def _lines(tree: Tree) -> Iterator[tuple[str, int]]:
    """Yield what is drawn before each turn, and its number; a turn's followers come right after it.

    A single follower stays at the same indentation.
    """
    children = tree.children()
    # (drawn before the turn, drawn before what follows it, number)
    waiting: list[tuple[str, str, int]] = []

    def follow(number: int, lead: str) -> None:
        followers = children[number]
        if len(followers) == 1:
            waiting.append((lead, lead, followers[0]))
            return
        for child in reversed(followers):
            last = child == followers[-1]
            waiting.append(
                (lead + ("└─" if last else "├─"), lead + ("  " if last else "│ "), child)
            )

    follow(0, "")
    while waiting:
        lead, below, number = waiting.pop()
        yield lead, number
        follow(number, below)
