"""/undo, /regen, /edit, /branch, /switch and /tree: go to other turns of the conversation's tree,
and add branches to it. These commands never delete a turn.
"""

from collections.abc import Iterable

from llmcli.chat.ask import ask_and_print
from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands.base import ReplCommand
from llmcli.chat.display import tree_drawing
from llmcli.errors import UserError
from llmcli.units import format_count

EDIT_BRANCH = "edit"  # branches that /edit makes are called edit-1, edit-2 and so on


def undo_turn(chat: ChatSession, argument: str) -> None:
    """Undo the last turn; /switch brings it back."""
    number, question = chat.conversation.tree.current_turn, chat.conversation.undo_turn()
    if question is None:
        raise UserError("there is no turn to undo", hint="ask something first")
    chat.pending_message = None
    chat.ui.text(
        f"undid {tree_drawing.shorten(question, tree_drawing.QUOTED_CHARS)!r}: /switch {number} brings it back"
    )


def regenerate(chat: ChatSession, argument: str) -> None:
    """Answer the last message again; the previous answer stays in the tree.

    This also works for a message whose answer was prevented by an error or Ctrl-C.
    """
    previous_turn, previous_pending = chat.conversation.tree.current_turn, chat.pending_message
    question = chat.pending_message or chat.conversation.undo_turn()
    if question is None:
        raise UserError("there is nothing to answer again", hint="ask something first")
    _ask_from(chat, question, previous_turn, previous_pending)


def edit_question(chat: ChatSession, argument: str) -> None:
    """Ask the last question, or question N, in other words, as a new branch.

    `/edit TEXT` asks TEXT in place of the last question, `/edit 2 TEXT` in place of the second. If
    TEXT is left out on a terminal, the old question appears in the input line for editing. The
    branch gets a name such as edit-1; the present branch keeps the old question and everything
    after it.
    """
    tree = chat.conversation.tree
    path = tree.current_path()
    if not path:
        raise UserError("there is no question to change", hint="ask something first")
    first, *text = argument.split(None, 1) or [""]
    position = len(path)
    if first.isascii() and first.isdigit():
        position, argument = int(first[:9]), "".join(text)
        if not 1 <= position <= len(path):
            raise UserError(
                f"there is no question {position}",
                hint=f"the conversation has {format_count(len(path), 'question')}: /edit N TEXT",
            )
    turn = tree[path[position - 1]]
    if not argument:
        if not chat.can_prefill:
            raise UserError(
                "/edit needs the new text",
                hint=f"/edit {position} TEXT changes question {position}",
            )
        chat.next_draft = f"/edit {position} {turn.question}"
        return
    previous_turn, previous_branch = tree.current_turn, tree.current_branch
    previous_pending = chat.pending_message
    name = tree.start_branch(turn.parent, EDIT_BRANCH)
    chat.record_position()
    try:
        ask_and_print(chat, argument)
    finally:
        if chat.pending_message is not None:  # there is no answer
            del tree.branch_ends[name]
            tree.current_turn, tree.current_branch = previous_turn, previous_branch
            chat.pending_message = previous_pending
            chat.record_position()
    if tree.current_branch == name:
        back = previous_branch or previous_turn
        chat.ui.note(f"on new branch {name}: /switch {back} goes back, /tree shows all")


def _ask_from(
    chat: ChatSession, question: str, previous_turn: int, previous_pending: str | None
) -> None:
    """Ask `question` after the current turn. If it gets no answer, go back to the turn numbered
    `previous_turn`, and make `previous_pending` the session's pending message again.
    """
    try:
        ask_and_print(chat, question)
    finally:
        if chat.pending_message is not None:
            chat.conversation.tree.move_to(previous_turn)
            chat.pending_message = previous_pending
    if (
        previous_turn
        and chat.conversation.tree.current_turn != previous_turn
        and chat.conversation.tree[chat.conversation.tree.current_turn].parent != previous_turn
    ):
        chat.ui.note(
            f"the previous turns are kept: /switch {previous_turn} goes back, /tree shows all"
        )


def create_or_list_branches(chat: ChatSession, argument: str) -> None:
    """Create a branch here; without a name, list the branches.

    The branch starts at the current turn, and grows with the following turns.
    """
    tree = chat.conversation.tree
    if argument:
        previous = tree.current_branch
        tree.create_branch(argument)
        remark = f"; {previous} stays at that turn" if previous else ""
        chat.ui.text(f"on new branch {argument}, starting after turn {tree.current_turn}{remark}")
        return
    ends = [(name, end) for name, end in tree.branch_ends.items()]
    branch_ends = {end for _, end in ends}
    ends += [("", tip) for tip in tree.leaf_turns() if tip not in branch_ends]
    rows = [
        (
            f"{'* ' if name and name == tree.current_branch else '  '}{name or '-'}",
            str(end),
            tree_drawing.shorten(tree[end].question, tree_drawing.QUOTED_CHARS) if end else "",
        )
        for name, end in ends
    ]
    chat.ui.table(("branch", "last turn", "its question"), rows, right=("last turn",))


def switch_position(chat: ChatSession, argument: str) -> None:
    """Go to a branch by its name, or to any turn by its number."""
    if not argument:
        raise UserError(
            "/switch needs a branch or a turn", hint="/switch NAME or NUMBER; /tree shows them"
        )
    tree = chat.conversation.tree
    tree.switch_to(argument)
    chat.pending_message = None
    cached = chat.model.describe_position(chat)
    position = f"at turn {tree.current_turn}" + (
        f" on {tree.current_branch}" if tree.current_branch else ""
    )
    chat.ui.text(
        f"{position}: {format_count(len(tree.current_path()), 'turn')}"
        + (f", {cached}" if cached else "")
    )


def show_tree(chat: ChatSession, argument: str) -> None:
    """Draw the tree of turns, with the path to the current turn."""
    tree = chat.conversation.tree
    if not tree.turns:
        raise UserError("there is no turn yet", hint="ask something first")
    chat.ui.table(
        ("turn", "question", "answer", "tokens", ""),
        tree_drawing.tree_rows(tree),
        right=("tokens",),
    )
    count, size = len(tree.current_path()), chat.model.conversation_size(chat)
    n_tokens = f", {size} tokens" if size else ""
    branch_name = tree.current_branch or "no branch"
    chat.ui.text(f"{branch_name}: {count} of {len(tree.turns)} turns on the path (●){n_tokens}")


def _switch_targets(chat: ChatSession) -> Iterable[str]:
    """Return what Tab offers after /switch: branches, and numbers of turns without followers."""
    return [*chat.conversation.tree.branch_ends, *map(str, chat.conversation.tree.leaf_turns())]


COMMANDS = (
    ReplCommand("undo", undo_turn),
    ReplCommand("regen", regenerate, aliases=("retry",)),
    ReplCommand("edit", edit_question, "[N] [TEXT]"),
    ReplCommand("branch", create_or_list_branches, "[NAME]"),
    ReplCommand("switch", switch_position, "NAME|TURN", first_completions=_switch_targets),
    ReplCommand("tree", show_tree),
)
