"""/undo, /regen, /edit, /branch, /switch and /tree: the conversation is a tree, and no turn of it
is lost.
"""

from collections.abc import Iterable

from llmcli.chat.chat_session import Talk
from llmcli.chat.commands.base import Command
from llmcli.chat.display import tree_drawing
from llmcli.errors import UserError

SHOWN = 40  # characters of a question that a line tells


def undo(talk: Talk, rest: str) -> None:
    """Take the last turn back; /switch brings it back."""
    number, question = talk.session.tree.at, talk.session.undo()
    if question is None:
        raise UserError("there is no turn to take back", hint="ask something first")
    talk.unanswered = None
    talk.ui.text(
        f"took back {tree_drawing.shortened(question, SHOWN)!r}: /switch {number} brings it back"
    )


def regenerate(talk: Talk, rest: str) -> None:
    """Answer the last message again; the answer before stays in the tree.

    Also a message that an error or Ctrl-C kept from its answer.
    """
    old, held = talk.session.tree.at, talk.unanswered
    question = talk.unanswered or talk.session.undo()
    if question is None:
        raise UserError("there is nothing to answer again", hint="ask something first")
    _ask_from(talk, question, old, held)


def edit(talk: Talk, rest: str) -> None:
    """Ask the last question, or question N, in other words, as a new branch.

    `/edit TEXT` changes the last one, `/edit 2 TEXT` the second; without TEXT a terminal offers the
    old one to change. What was said after it stays in the tree.
    """
    tree = talk.session.tree
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
                hint=f"the conversation has {len(path)}: /edit N TEXT",
            )
    turn = tree[path[position - 1]]
    if not rest:
        if not talk.prefills:
            raise UserError(
                "there is no new text", hint=f"/edit {position} TEXT changes question {position}"
            )
        talk.draft = f"/edit {position} {turn.question}"
        return
    old, held = tree.at, talk.unanswered
    tree.move(turn.parent)
    _ask_from(talk, rest, old, held)


def _ask_from(talk: Talk, question: str, old: int, held: str | None) -> None:
    """Ask where the conversation is now; if nothing comes of it all is as it was at turn `old`."""
    from llmcli.chat.ask import answer

    try:
        answer(talk, question)
    finally:
        if talk.unanswered is not None:
            talk.session.tree.move(old)
            talk.unanswered = held
    if (
        old
        and talk.session.tree.at != old
        and talk.session.tree[talk.session.tree.at].parent != old
    ):
        talk.ui.note(f"what was said before is kept: /switch {old}, /tree shows all")


def branch(talk: Talk, rest: str) -> None:
    """Begin a branch here under a name; alone, list the branches."""
    tree = talk.session.tree
    if rest:
        before = tree.branch
        tree.fork(rest)
        kept = f"; {before} stays where it was" if before else ""
        talk.ui.text(f"on branch {rest} from turn {tree.at} on{kept}")
        return
    ends = [(name, end) for name, end in tree.names.items()]
    named = {end for _, end in ends}
    ends += [("", tip) for tip in tree.tips() if tip not in named]
    rows = [
        (
            f"{'* ' if name and name == tree.branch else '  '}{name or '-'}",
            str(end),
            tree_drawing.shortened(tree[end].question, SHOWN) if end else "",
        )
        for name, end in ends
    ]
    talk.ui.table(("branch", "ends with turn", "its question"), rows, right=("ends with turn",))


def switch(talk: Talk, rest: str) -> None:
    """Go to a branch by its name, or to any turn by its number."""
    if not rest:
        raise UserError(
            "there is no place to go to", hint="/switch NAME or NUMBER; /tree shows them"
        )
    tree = talk.session.tree
    tree.switch(rest)
    talk.unanswered = None
    spoken = talk.spoken()
    cached = (
        f", {talk.runner.engine.ledger.nearest(spoken)[1]} of {len(spoken)} tokens in the cache"
        if spoken
        else ""
    )
    count = len(tree.path())
    talk.ui.text(
        f"at turn {tree.at}{f' on {tree.branch}' if tree.branch else ''}: {count} turn{'s' * (count != 1)}{cached}"
    )


def show_tree(talk: Talk, rest: str) -> None:
    """Draw the conversation's tree: every turn, the path to here, cut answers."""
    tree = talk.session.tree
    if not tree.turns:
        raise UserError("there is no turn yet", hint="ask something first")
    talk.ui.table(
        ("turn", "question", "answer", "tokens", ""), tree_drawing.rows(tree), right=("tokens",)
    )
    count, spoken = len(tree.path()), talk.spoken()
    told = f", {len(spoken)} tokens" if spoken else ""
    talk.ui.text(
        f"{tree.branch or 'no branch'}: {count} of {len(tree.turns)} turns on the path (●){told}"
    )


def _places(talk: Talk) -> Iterable[str]:
    return [*talk.session.tree.names, *map(str, talk.session.tree.tips())]


COMMANDS = (
    Command("undo", undo),
    Command("regen", regenerate, aliases=("retry",)),
    Command("edit", edit, "[N] [TEXT]"),
    Command("branch", branch, "[NAME]"),
    Command("switch", switch, "NAME|TURN", completions=_places),
    Command("tree", show_tree),
)
