from collections.abc import Callable

import pytest

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands import commands, run_command
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.errors import UserError

Make = Callable[..., ChatSession]
Out = pytest.CaptureFixture[str]


def said(talk: ChatSession) -> list[str]:
    return [message.content for message in talk.conversation.messages]


def spoken(talk: Make, *texts: str, **more: int) -> ChatSession:
    """A talk in which these were asked."""
    one = talk(b"yes", **more)
    for text in texts:
        one.ask(text, StreamWriter(silent=True))
    return one


def test_undo_takes_a_turn_back_and_switch_brings_it_back(talk: Make, capsys: Out) -> None:
    one = spoken(talk, "a?", "b?")
    run_command(one, "/undo")
    assert capsys.readouterr().out == "undid 'b?': /switch 2 brings it back\n"
    assert said(one) == ["a?", "yes"]
    run_command(one, "/switch 2")
    assert said(one) == ["a?", "yes", "b?", "yes"]
    run_command(one, "/undo")
    run_command(one, "/undo")
    with pytest.raises(UserError, match="no turn to undo"):
        run_command(one, "/undo")


def test_regen_keeps_the_answer_before_as_a_branch(talk: Make, capsys: Out) -> None:
    one = spoken(talk, "a?", "b?")
    run_command(one, "/regen")
    assert "/switch 2" in capsys.readouterr().err
    assert (said(one), one.conversation.tree.current_turn) == (["a?", "yes", "b?", "yes"], 3)
    assert [turn.parent for turn in one.conversation.tree.turns] == [0, 1, 1]
    assert one.conversation.tree.branch_ends == {"main": 3}


@pytest.mark.parametrize(
    ("line", "now"),
    [
        ("/edit c?", ["a?", "yes", "c?", "yes"]),
        ("/edit 1 c?", ["c?", "yes"]),
        ("/edit 2  c\nd", ["a?", "yes", "c\nd", "yes"]),
        ("/edit 2 2 and 2", ["a?", "yes", "2 and 2", "yes"]),
    ],
)
def test_edit_asks_in_other_words_and_keeps_the_old(line: str, now: list[str], talk: Make) -> None:
    one = spoken(talk, "a?", "b?")
    run_command(one, line)
    assert said(one) == now
    run_command(one, "/switch 2")
    assert said(one) == ["a?", "yes", "b?", "yes"]


def test_edit_alone_offers_the_old_text_where_lines_are_typed(talk: Make) -> None:
    one = spoken(talk, "a?", "b?\nc")
    with pytest.raises(UserError, match="needs the new text") as error:
        run_command(one, "/edit")
    assert "/edit 2 TEXT" in error.value.hint
    one.can_prefill = True
    run_command(one, "/edit")
    assert one.next_draft == "/edit 2 b?\nc"
    run_command(one, "/edit 1")
    assert one.next_draft == "/edit 1 a?"
    for line in ("/edit 3 x", "/edit 0 x"):
        with pytest.raises(UserError, match="there is no question"):
            run_command(one, line)


def test_an_edit_that_comes_to_nothing_leaves_all_as_it_was(talk: Make) -> None:
    one = spoken(talk, "a?", "b?", n_ctx=64)
    with pytest.raises(UserError, match="the context holds"):
        run_command(one, f"/edit 1 {'x' * 64}")
    assert (said(one), one.pending_message, one.conversation.tree.current_turn) == (
        ["a?", "yes", "b?", "yes"],
        None,
        2,
    )
    one.runner.engine.ledger.check()


def test_branches_are_begun_listed_and_gone_to(talk: Make, capsys: Out) -> None:
    one = spoken(talk, "a?")
    run_command(one, "/branch other")
    one.ask("b?", StreamWriter(silent=True))
    run_command(one, "/switch main")
    assert said(one) == ["a?", "yes"]
    one.ask("c?", StreamWriter(silent=True))
    run_command(one, "/undo")
    capsys.readouterr()
    run_command(one, "/branch")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [["*", "main", "1", "a?"], ["other", "2", "b?"], ["-", "3", "c?"]]
    assert list(commands()["switch"].first_completions(one)) == ["main", "other", "2", "3"]
    run_command(one, "/switch other")
    assert said(one) == ["a?", "yes", "b?", "yes"]
    with pytest.raises(UserError, match="no branch or turn called 'nowhere'"):
        run_command(one, "/switch nowhere")
    with pytest.raises(UserError, match="a branch called main already exists"):
        run_command(one, "/branch main")


def test_going_to_another_branch_computes_only_what_was_not_said_there(
    talk: Make, capsys: Out
) -> None:
    one = spoken(talk, "a?", n_seq_max=4)
    run_command(one, "/branch other")
    one.ask("b?", StreamWriter(silent=True))
    run_command(one, "/switch main")
    one.ask("c?", StreamWriter(silent=True))
    run_command(one, "/switch other")
    whole = len(one.conversation_tokens())
    assert (
        f"{whole - 1} of {whole} tokens in the cache" in capsys.readouterr().out
    )  # but the line break that ends it
    back = one.ask("d?", StreamWriter(silent=True))
    assert back.cached_tokens == whole - 1
    run_command(one, "/switch main")
    again = one.ask("e?", StreamWriter(silent=True))
    assert again.prompt_tokens - again.cached_tokens == len("\n<user>e?\n<assistant>")
    ledger = one.runner.engine.ledger
    ledger.check()
    assert ledger.used_cells < sum(map(len, ledger.tokens))  # the first turn lies there once


def test_the_tree_is_drawn(talk: Make, capsys: Out) -> None:
    one = talk(b"yes")
    with pytest.raises(UserError, match="no turn yet"):
        run_command(one, "/tree")
    one = spoken(talk, "a?", "b?")
    run_command(one, "/regen")
    capsys.readouterr()
    run_command(one, "/tree")
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line.split() for line in lines[1:-1]] == [
        ["●", "1", "a?", "yes", "3"],
        ["├─○", "2", "b?", "yes", "3"],
        ["└─●", "3", "b?", "yes", "3", "main,", "<-", "here"],
    ]
    assert (
        lines[-1] == f"main: 2 of 3 turns on the path (●), {len(one.conversation_tokens())} tokens"
    )
