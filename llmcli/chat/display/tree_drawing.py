"""The conversation's tree drawn as text: one line for each turn."""

from collections.abc import Iterator

from llmcli.chat.conversation.turn_tree import TurnTree
from llmcli.chat.display.styles import escape_line

ON_PATH_MARK, OFF_PATH_MARK = "●", "○"
QUESTION_CHARS, ANSWER_CHARS = 24, 28  # characters shown of a question and of an answer
QUOTED_CHARS = 40  # characters of a question that a message quotes


def tree_rows(tree: TurnTree) -> list[tuple[str, str, str, str, str]]:
    """Return the rows of the /tree table: drawing and number, question, answer, tokens, remarks."""
    path = set(tree.current_path())
    branches: dict[int, list[str]] = {}
    for name, end in tree.branch_ends.items():
        branches.setdefault(end, []).append(name)
    table = []
    for lead, number in _lines(tree):
        turn = tree[number]
        remarks = ["cut"] * turn.is_stopped + ["left the context"] * (number in tree.dropped)
        remarks += branches.get(number, [])
        remarks += ["<- here"] if number == tree.current_turn else []
        table.append(
            (
                f"{lead}{ON_PATH_MARK if number in path else OFF_PATH_MARK} {number}",
                shorten(turn.question, QUESTION_CHARS),
                shorten(turn.answer, ANSWER_CHARS),
                f"{turn.n_tokens or '-'}",
                ", ".join(remarks),
            )
        )
    return table


def shorten(text: str, max_chars: int) -> str:
    """Return a text on one line of at most `max_chars` characters; an ellipsis marks a cut."""
    line = escape_line(text[: max_chars + 1])
    return line if len(line) <= max_chars else line[: max_chars - 1] + "…"


def _lines(tree: TurnTree) -> Iterator[tuple[str, int]]:
    """Yield, for each turn, the characters drawn before it, and its number.

    The followers of a turn come right after it; a single follower has the same indentation.
    """
    children = tree.follower_lists()
    # (characters before the turn, characters before its followers, number)
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
