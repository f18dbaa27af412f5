from collections.abc import Callable

import pytest

from llmcli.chat.chat_session import Talk
from llmcli.chat.commands import commands, perform
from llmcli.chat.display.stream_writer import Stream
from llmcli.errors import UserError

Make = Callable[..., Talk]
Out = pytest.CaptureFixture[str]


def said(talk: Talk) -> list[str]:
    return [message.content for message in talk.session.messages]


def spoken(talk: Make, *texts: str, **more: int) -> Talk:
    """A talk in which these were asked."""
    one = talk(b"yes", **more)
    for text in texts:
        one.ask(text, Stream(silent=True))
    return one


def test_undo_takes_a_turn_back_and_switch_brings_it_back(talk: Make, capsys: Out) -> None:
    one = spoken(talk, "a?", "b?")
    perform(one, "/undo")
    assert capsys.readouterr().out == "undid 'b?': /switch 2 brings it back\n"
    assert said(one) == ["a?", "yes"]
    perform(one, "/switch 2")
    assert said(one) == ["a?", "yes", "b?", "yes"]
    perform(one, "/undo")
    perform(one, "/undo")
    with pytest.raises(UserError, match="no turn to undo"):
        perform(one, "/undo")


def test_regen_keeps_the_answer_before_as_a_branch(talk: Make, capsys: Out) -> None:
    one = spoken(talk, "a?", "b?")
    perform(one, "/regen")
    assert "/switch 2" in capsys.readouterr().err
    assert (said(one), one.session.tree.at) == (["a?", "yes", "b?", "yes"], 3)
    assert [turn.parent for turn in one.session.tree.turns] == [0, 1, 1]
    assert one.session.tree.names == {"main": 3}


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
    perform(one, line)
    assert said(one) == now
    perform(one, "/switch 2")
    assert said(one) == ["a?", "yes", "b?", "yes"]


def test_edit_alone_offers_the_old_text_where_lines_are_typed(talk: Make) -> None:
    one = spoken(talk, "a?", "b?\nc")
    with pytest.raises(UserError, match="needs the new text") as error:
        perform(one, "/edit")
    assert "/edit 2 TEXT" in error.value.hint
    one.prefills = True
    perform(one, "/edit")
    assert one.draft == "/edit 2 b?\nc"
    perform(one, "/edit 1")
    assert one.draft == "/edit 1 a?"
    for line in ("/edit 3 x", "/edit 0 x"):
        with pytest.raises(UserError, match="there is no question"):
            perform(one, line)


def test_an_edit_that_comes_to_nothing_leaves_all_as_it_was(talk: Make) -> None:
    one = spoken(talk, "a?", "b?", n_ctx=64)
    with pytest.raises(UserError, match="the context holds"):
        perform(one, f"/edit 1 {'x' * 64}")
    assert (said(one), one.unanswered, one.session.tree.at) == (["a?", "yes", "b?", "yes"], None, 2)
    one.runner.engine.ledger.check()


def test_branches_are_begun_listed_and_gone_to(talk: Make, capsys: Out) -> None:
    one = spoken(talk, "a?")
    perform(one, "/branch other")
    one.ask("b?", Stream(silent=True))
    perform(one, "/switch main")
    assert said(one) == ["a?", "yes"]
    one.ask("c?", Stream(silent=True))
    perform(one, "/undo")
    capsys.readouterr()
    perform(one, "/branch")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [["*", "main", "1", "a?"], ["other", "2", "b?"], ["-", "3", "c?"]]
    assert list(commands()["switch"].completions(one)) == ["main", "other", "2", "3"]
    perform(one, "/switch other")
    assert said(one) == ["a?", "yes", "b?", "yes"]
    with pytest.raises(UserError, match="no branch or turn called 'nowhere'"):
        perform(one, "/switch nowhere")
    with pytest.raises(UserError, match="a branch called main already exists"):
        perform(one, "/branch main")


def test_going_to_another_branch_computes_only_what_was_not_said_there(
    talk: Make, capsys: Out
) -> None:
    one = spoken(talk, "a?", n_seq_max=4)
    perform(one, "/branch other")
    one.ask("b?", Stream(silent=True))
    perform(one, "/switch main")
    one.ask("c?", Stream(silent=True))
    perform(one, "/switch other")
    whole = len(one.spoken())
    assert (
        f"{whole - 1} of {whole} tokens in the cache" in capsys.readouterr().out
    )  # but the line break that ends it
    back = one.ask("d?", Stream(silent=True))
    assert back.cached_tokens == whole - 1
    perform(one, "/switch main")
    again = one.ask("e?", Stream(silent=True))
    assert again.prompt_tokens - again.cached_tokens == len("\n<user>e?\n<assistant>")
    ledger = one.runner.engine.ledger
    ledger.check()
    assert ledger.used_cells < sum(map(len, ledger.tokens))  # the first turn lies there once


def test_the_tree_is_drawn(talk: Make, capsys: Out) -> None:
    one = talk(b"yes")
    with pytest.raises(UserError, match="no turn yet"):
        perform(one, "/tree")
    one = spoken(talk, "a?", "b?")
    perform(one, "/regen")
    capsys.readouterr()
    perform(one, "/tree")
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line.split() for line in lines[1:-1]] == [
        ["●", "1", "a?", "yes", "3"],
        ["├─○", "2", "b?", "yes", "3"],
        ["└─●", "3", "b?", "yes", "3", "main,", "<-", "here"],
    ]
    assert lines[-1] == f"main: 2 of 3 turns on the path (●), {len(one.spoken())} tokens"
