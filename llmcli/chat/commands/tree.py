"""/undo, /regen, /edit, /branch, /switch and /tree: work with the tree of turns.

The commands never delete a turn.
"""

from collections.abc import Iterable

from llmcli.chat.chat_session import Talk
from llmcli.chat.commands.base import Command
from llmcli.chat.display import tree_drawing
from llmcli.errors import UserError
from llmcli.units import several

SHOWN = 40  # characters of a question shown in a message


def undo(chat: Talk, rest: str) -> None:
    """Undo the last turn; /switch brings it back."""
    number, question = chat.session.tree.at, chat.session.undo()
    if question is None:
        raise UserError("there is no turn to undo", hint="ask something first")
    chat.unanswered = None
    chat.ui.text(
        f"undid {tree_drawing.shortened(question, SHOWN)!r}: /switch {number} brings it back"
    )


def regenerate(chat: Talk, rest: str) -> None:
    """Answer the last message again; the previous answer stays in the tree.

    This also works for a message whose answer was prevented by an error or Ctrl-C.
    """
    old, old_message = chat.session.tree.at, chat.unanswered
    question = chat.unanswered or chat.session.undo()
    if question is None:
        raise UserError("there is nothing to answer again", hint="ask something first")
    _ask_from(chat, question, old, old_message)


def edit(chat: Talk, rest: str) -> None:
    """Ask the last question, or question N, in other words, as a new branch.

    `/edit TEXT` replaces the last question, `/edit 2 TEXT` the second. Without TEXT, a terminal
    offers the old question for editing. Everything after that question stays in the tree.
    """
    tree = chat.session.tree
    path = tree.path()
    if not path:
        raise UserError("there is no question to change", hint="ask something first")
    first, *text = rest.split(None, 1) or [""]
    position = len(path)
    if first.isascii() and first.isdigit():
        position, rest = int(first[:9]), "".join(text)
        if not 1 <= position <= len(path):
            raise UserError(
                f"there is no question {position}",
                hint=f"the conversation has {len(path)} questions: /edit N TEXT",
            )
    turn = tree[path[position - 1]]
    if not rest:
        if not chat.prefills:
            raise UserError(
                "/edit needs the new text",
                hint=f"/edit {position} TEXT changes question {position}",
            )
        chat.draft = f"/edit {position} {turn.question}"
        return
    old, old_message = tree.at, chat.unanswered
    tree.move(turn.parent)
    _ask_from(chat, rest, old, old_message)


def _ask_from(chat: Talk, question: str, old: int, held: str | None) -> None:
    """Ask at the current turn; if there is no answer, go back to turn `old`."""
    from llmcli.chat.ask import answer

    try:
        answer(chat, question)
    finally:
        if chat.unanswered is not None:
            chat.session.tree.move(old)
            chat.unanswered = held
    if (
        old
        and chat.session.tree.at != old
        and chat.session.tree[chat.session.tree.at].parent != old
    ):
        chat.ui.note(f"the previous turns are kept: /switch {old} goes back, /tree shows all")


def branch(chat: Talk, rest: str) -> None:
    """Create a branch here; without a name, list the branches."""
    tree = chat.session.tree
    if rest:
        previous = tree.branch
        tree.fork(rest)
        remark = f"; {previous} stays at that turn" if previous else ""
        chat.ui.text(f"on new branch {rest}, starting after turn {tree.at}{remark}")
        return
    ends = [(name, end) for name, end in tree.names.items()]
    branch_ends = {end for _, end in ends}
    ends += [("", tip) for tip in tree.tips() if tip not in branch_ends]
    rows = [
        (
            f"{'* ' if name and name == tree.branch else '  '}{name or '-'}",
            str(end),
            tree_drawing.shortened(tree[end].question, SHOWN) if end else "",
        )
        for name, end in ends
    ]
    chat.ui.table(("branch", "last turn", "its question"), rows, right=("last turn",))


def switch(chat: Talk, rest: str) -> None:
    """Go to a branch by its name, or to any turn by its number."""
    if not rest:
        raise UserError(
            "/switch needs a branch or a turn", hint="/switch NAME or NUMBER; /tree shows them"
        )
    tree = chat.session.tree
    tree.switch(rest)
    chat.unanswered = None
    tokens = chat.spoken()
    cached = ""
    if tokens:
        n_cached = chat.runner.engine.ledger.find_nearest(tokens)[1]
        cached = f", {n_cached} of {len(tokens)} tokens in the cache"
    position = f"at turn {tree.at}" + (f" on {tree.branch}" if tree.branch else "")
    chat.ui.text(f"{position}: {several(len(tree.path()), 'turn')}{cached}")


def show_tree(chat: Talk, rest: str) -> None:
    """Draw the tree of turns, with the path to the current turn."""
    tree = chat.session.tree
    if not tree.turns:
        raise UserError("there is no turn yet", hint="ask something first")
    chat.ui.table(
        ("turn", "question", "answer", "tokens", ""), tree_drawing.rows(tree), right=("tokens",)
    )
    count, tokens = len(tree.path()), chat.spoken()
    n_tokens = f", {len(tokens)} tokens" if tokens else ""
    branch_name = tree.branch or "no branch"
    chat.ui.text(f"{branch_name}: {count} of {len(tree.turns)} turns on the path (●){n_tokens}")


def _places(chat: Talk) -> Iterable[str]:
    return [*chat.session.tree.names, *map(str, chat.session.tree.tips())]


COMMANDS = (
    Command("undo", undo),
    Command("regen", regenerate, aliases=("retry",)),
    Command("edit", edit, "[N] [TEXT]"),
    Command("branch", branch, "[NAME]"),
    Command("switch", switch, "NAME|TURN", completions=_places),
    Command("tree", show_tree),
)
