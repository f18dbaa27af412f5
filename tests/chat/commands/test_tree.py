"""/undo, /regen, /edit, /branch, /switch and /tree."""

from collections.abc import Callable

import pytest

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands import commands, run_command
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.errors import UserError

MakeChat = Callable[..., ChatSession]
Capture = pytest.CaptureFixture[str]


def contents(chat: ChatSession) -> list[str]:
    """Return the texts of all messages."""
    return [message.content for message in chat.conversation.messages]


def chat_with(make_chat: MakeChat, *texts: str, **more: int) -> ChatSession:
    """Return a chat in which these questions were asked."""
    chat = make_chat(b"yes", **more)
    for text in texts:
        chat.ask(text, StreamWriter(silent=True))
    return chat


def test_switch_returns_to_an_undone_turn(make_chat: MakeChat, capsys: Capture) -> None:
    chat = chat_with(make_chat, "a?", "b?")
    run_command(chat, "/undo")
    assert capsys.readouterr().out == "undid 'b?': /switch 2 brings it back\n"
    assert contents(chat) == ["a?", "yes"]
    run_command(chat, "/switch 2")
    assert contents(chat) == ["a?", "yes", "b?", "yes"]
    run_command(chat, "/undo")
    run_command(chat, "/undo")
    with pytest.raises(UserError, match="no turn to undo"):
        run_command(chat, "/undo")


def test_regen_keeps_the_previous_answer_in_the_tree(make_chat: MakeChat, capsys: Capture) -> None:
    chat = chat_with(make_chat, "a?", "b?")
    run_command(chat, "/regen")
    assert "/switch 2" in capsys.readouterr().err
    assert (contents(chat), chat.conversation.tree.current_turn) == (["a?", "yes", "b?", "yes"], 3)
    assert [turn.parent for turn in chat.conversation.tree.turns] == [0, 1, 1]
    assert chat.conversation.tree.branch_ends == {"main": 3}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/edit c?", ["a?", "yes", "c?", "yes"]),
        ("/edit 1 c?", ["c?", "yes"]),
        ("/edit 2  c\nd", ["a?", "yes", "c\nd", "yes"]),
        ("/edit 2 2 and 2", ["a?", "yes", "2 and 2", "yes"]),
    ],
)
def test_edit_asks_a_changed_question_and_keeps_the_old_one(
    line: str, expected: list[str], make_chat: MakeChat
) -> None:
    chat = chat_with(make_chat, "a?", "b?")
    run_command(chat, line)
    assert contents(chat) == expected
    run_command(chat, "/switch 2")
    assert contents(chat) == ["a?", "yes", "b?", "yes"]


def test_edit_leaves_named_branches_where_they_are(make_chat: MakeChat, capsys: Capture) -> None:
    chat = chat_with(make_chat, "a?", "b?", "c?")
    tree = chat.conversation.tree
    run_command(chat, "/edit 2 other?")
    assert "on new branch edit-1: /switch main goes back" in capsys.readouterr().err
    assert tree.branch_ends == {"main": 3, "edit-1": 4}
    run_command(chat, "/branch mine")
    chat.ask("d?", StreamWriter(silent=True))
    run_command(chat, "/edit 1 first?")
    assert tree.branch_ends == {"main": 3, "edit-1": 4, "mine": 5, "edit-2": 6}
    run_command(chat, "/switch main")
    assert contents(chat)[::2] == ["a?", "b?", "c?"]
    run_command(chat, "/switch mine")
    assert contents(chat)[::2] == ["a?", "other?", "d?"]
    run_command(chat, "/switch 1")  # a turn without a branch
    run_command(chat, "/edit again?")
    assert "/switch 1 goes back" in capsys.readouterr().err
    assert tree.current_branch == "edit-3"


def test_edit_without_text_puts_the_old_question_into_the_input_line(make_chat: MakeChat) -> None:
    chat = chat_with(make_chat, "a?", "b?\nc")
    with pytest.raises(UserError, match="needs the new text") as error:
        run_command(chat, "/edit")
    assert "/edit 2 TEXT" in error.value.hint
    chat.can_prefill = True
    run_command(chat, "/edit")
    assert chat.next_draft == "/edit 2 b?\nc"
    run_command(chat, "/edit 1")
    assert chat.next_draft == "/edit 1 a?"
    for line in ("/edit 3 x", "/edit 0 x"):
        with pytest.raises(UserError, match="there is no question"):
            run_command(chat, line)


def test_a_failed_edit_changes_nothing(make_chat: MakeChat) -> None:
    chat = chat_with(make_chat, "a?", "b?", n_ctx=64)
    with pytest.raises(UserError, match="the context holds"):
        run_command(chat, f"/edit 1 {'x' * 64}")
    assert (contents(chat), chat.pending_message, chat.conversation.tree.current_turn) == (
        ["a?", "yes", "b?", "yes"],
        None,
        2,
    )
    assert chat.conversation.tree.branch_ends == {"main": 2}
    assert chat.conversation.tree.current_branch == "main"
    chat.runner.engine.ledger.check()


def test_branches_are_created_listed_and_switched_to(make_chat: MakeChat, capsys: Capture) -> None:
    chat = chat_with(make_chat, "a?")
    run_command(chat, "/branch other")
    chat.ask("b?", StreamWriter(silent=True))
    run_command(chat, "/switch main")
    assert contents(chat) == ["a?", "yes"]
    chat.ask("c?", StreamWriter(silent=True))
    run_command(chat, "/undo")
    capsys.readouterr()
    run_command(chat, "/branch")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [["*", "main", "1", "a?"], ["other", "2", "b?"], ["-", "3", "c?"]]
    assert list(commands()["switch"].first_completions(chat)) == ["main", "other", "2", "3"]
    run_command(chat, "/switch other")
    assert contents(chat) == ["a?", "yes", "b?", "yes"]
    with pytest.raises(UserError, match="no branch or turn called 'nowhere'"):
        run_command(chat, "/switch nowhere")
    with pytest.raises(UserError, match="a branch called main already exists"):
        run_command(chat, "/branch main")


def test_after_a_switch_only_new_tokens_are_computed(make_chat: MakeChat, capsys: Capture) -> None:
    chat = chat_with(make_chat, "a?", n_seq_max=4)
    run_command(chat, "/branch other")
    chat.ask("b?", StreamWriter(silent=True))
    run_command(chat, "/switch main")
    chat.ask("c?", StreamWriter(silent=True))
    run_command(chat, "/switch other")
    n_tokens = len(chat.conversation_tokens())
    assert (
        f"{n_tokens - 1} of {n_tokens} tokens in the cache" in capsys.readouterr().out
    )  # all but the final line break
    answer = chat.ask("d?", StreamWriter(silent=True))
    assert answer.cached_tokens == n_tokens - 1
    run_command(chat, "/switch main")
    answer = chat.ask("e?", StreamWriter(silent=True))
    assert answer.prompt_tokens - answer.cached_tokens == len("\n<user>e?\n<assistant>")
    ledger = chat.runner.engine.ledger
    ledger.check()
    assert ledger.used_cells < sum(
        map(len, ledger.tokens)
    )  # the first turn is stored once for both branches


def test_the_tree_is_drawn(make_chat: MakeChat, capsys: Capture) -> None:
    chat = make_chat(b"yes")
    with pytest.raises(UserError, match="no turn yet"):
        run_command(chat, "/tree")
    chat = chat_with(make_chat, "a?", "b?")
    run_command(chat, "/regen")
    capsys.readouterr()
    run_command(chat, "/tree")
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line.split() for line in lines[1:-1]] == [
        ["●", "1", "a?", "yes", "3"],
        ["├─○", "2", "b?", "yes", "3"],
        ["└─●", "3", "b?", "yes", "3", "main,", "<-", "here"],
    ]
    assert (
        lines[-1] == f"main: 2 of 3 turns on the path (●), {len(chat.conversation_tokens())} tokens"
    )
