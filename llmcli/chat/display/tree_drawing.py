"""A conversation's tree, drawn: a line for each turn, those that nothing parts stand below one
another.
"""

from collections.abc import Iterator

from llmcli.chat.conversation.turn_tree import Tree
from llmcli.chat.display.styles import one_line

HERE, ELSEWHERE = "●", "○"
QUESTION, ANSWER = 24, 28  # characters shown of each


def rows(tree: Tree) -> list[tuple[str, str, str, str, str]]:
    """Rows of the /tree table: where it hangs and its number, question, answer, tokens, what else
    there is to tell.
    """
    path = set(tree.path())
    named: dict[int, list[str]] = {}
    for name, end in tree.names.items():
        named.setdefault(end, []).append(name)
    found = []
    for lead, number in _lines(tree):
        turn = tree[number]
        words = ["cut"] * turn.cut + ["left the context"] * (number in tree.left)
        words += named.get(number, [])
        words += ["<- here"] if number == tree.at else []
        found.append(
            (
                f"{lead}{HERE if number in path else ELSEWHERE} {number}",
                shortened(turn.question, QUESTION),
                shortened(turn.answer, ANSWER),
                f"{turn.tokens or '-'}",
                ", ".join(words),
            )
        )
    return found


def shortened(text: str, most: int) -> str:
    """The beginning of a text on one line; an ellipsis where there is more."""
    line = one_line(text[: most + 1])
    return line if len(line) <= most else line[: most - 1] + "…"


def _lines(tree: Tree) -> Iterator[tuple[str, int]]:
    """What is drawn before each turn, and its number: a turn's followers come right below it."""
    children = tree.children()
    waiting: list[
        tuple[str, str, int]
    ] = []  # drawn before it, drawn before what follows it, number

    def follow(number: int, lead: str) -> None:
        after = children[number]
        if len(after) == 1:
            waiting.append((lead, lead, after[0]))
            return
        for child in reversed(after):
            last = child == after[-1]
            waiting.append(
                (lead + ("└─" if last else "├─"), lead + ("  " if last else "│ "), child)
            )

    follow(0, "")
    while waiting:
        lead, below, number = waiting.pop()
        yield lead, number
        follow(number, below)
