"""Draws the tree of a conversation's turns as text, with one line for each turn."""

from collections.abc import Iterator

from llmcli.chat.conversation.turn_tree import TurnTree
from llmcli.chat.display.styles import escape_line

ON_PATH_MARK, OFF_PATH_MARK = "●", "○"  # turns of the current conversation, and other turns
QUESTION_CHARS, ANSWER_CHARS = 24, 28  # maximum lengths in the table
QUOTED_CHARS = 40  # maximum length of a question that is quoted in a message


def tree_rows(tree: TurnTree) -> list[tuple[str, str, str, str, str]]:
    """Return the rows of the /tree table. The columns are the drawn branch with the turn's number,
    the question, the answer, the answer's number of tokens, and remarks.
    """
    path = set(tree.current_path())
    branches: dict[int, list[str]] = {}
    for name, end in tree.branch_ends.items():
        branches.setdefault(end, []).append(name)
    table = []
    for prefix, number in _tree_lines(tree):
        turn = tree[number]
        remarks = ["cut"] * turn.is_stopped + ["left the context"] * (number in tree.dropped)
        remarks += branches.get(number, [])
        remarks += ["<- here"] if number == tree.current_turn else []
        table.append(
            (
                f"{prefix}{ON_PATH_MARK if number in path else OFF_PATH_MARK} {number}",
                shorten(turn.question, QUESTION_CHARS),
                shorten(turn.answer, ANSWER_CHARS),
                f"{turn.n_tokens or '-'}",
                ", ".join(remarks),
            )
        )
    return table


def shorten(text: str, max_chars: int) -> str:
    """Return a text on one line with at most `max_chars` characters. A longer text is cut off and
    ends with an ellipsis.
    """
    line = escape_line(text[: max_chars + 1])
    return line if len(line) <= max_chars else line[: max_chars - 1] + "…"


def _tree_lines(tree: TurnTree) -> Iterator[tuple[str, int]]:
    """Yield for each turn the characters that are drawn before it, and its number. The order is
    depth-first. An only child has the same indentation as its parent, so that a conversation
    without branches is not indented.
    """
    children = tree.follower_lists()
    # (characters before the turn, characters before its children, number)
    stack: list[tuple[str, str, int]] = []

    def push_followers(number: int, prefix: str) -> None:
        followers = children[number]
        if len(followers) == 1:
            stack.append((prefix, prefix, followers[0]))
            return
        for child in reversed(followers):
            last = child == followers[-1]
            stack.append(
                (prefix + ("└─" if last else "├─"), prefix + ("  " if last else "│ "), child)
            )

    push_followers(0, "")
    while stack:
        prefix, follower_prefix, number = stack.pop()
        yield prefix, number
        push_followers(number, follower_prefix)
