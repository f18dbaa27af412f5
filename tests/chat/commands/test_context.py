"""/context: the turns that the model is shown."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from llmcli.chat import cache_map
from llmcli.chat.chat_session import Talk
from llmcli.chat.conversation import session_log_reader, turn_records
from llmcli.chat.conversation.session_log import Log
from llmcli.chat.conversation.turn_tree import Tree
from llmcli.chat.display.stream_writer import Stream
from llmcli.chat.input_loop import say
from llmcli.errors import UserError

Make = Callable[..., Talk]
TURN = "<user>{}\n<assistant>yes, of course\n"


@pytest.fixture
def three(talk: Make) -> Talk:
    one = talk(b"yes, of course", n_ctx=400)
    one.session.system = "be kind"
    for question in ("the first thing", "and the second", "and the third one"):
        one.ask(question, Stream(silent=True))
    return one


def sent(talk: Talk) -> bytes:
    return bytes(token for token in talk.runner.engine.ledger.tokens[0] if token < 256)


def test_every_turn_is_listed_with_its_tokens(
    three: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    say(three, "/context")
    told = capsys.readouterr().out
    lines = {line.split("  ")[0].strip(): line for line in told.splitlines()}
    for number, question in enumerate(
        ("the first thing", "and the second", "and the third one"), 1
    ):
        assert f" {len(TURN.format(question))} " in lines[f"turn {number}"]
        assert question in lines[f"turn {number}"]
    assert "next to leave" in lines["turn 1"]
    held_now = three.held()
    assert f" {held_now} " in lines["total"] and f" {400 - held_now} " in lines["free"]
    say(three, "/context drop 2")
    assert (
        f"turn 2 left the context ({len(TURN.format('and the second'))} tokens)"
        in capsys.readouterr().out
    )
    say(three, "/context")
    told = capsys.readouterr().out
    assert "and the second" not in told and "turn 2 left the context" in told


def test_a_dropped_turn_is_not_sent_again_and_what_stays_is_not_computed_again(three: Talk) -> None:
    say(three, "/context drop 1")
    answer = three.ask("still there?", Stream(silent=True))
    three.runner.engine.ledger.check()
    assert sent(three) == (
        b"<system>be kind\n"
        + "".join(TURN.format(q) for q in ("and the second", "and the third one")).encode()
        + b"<user>still there?\n<assistant>yes, of course"
    )
    assert answer.cached_tokens >= len(sent(three)) - len(
        "\n<user>still there?\n<assistant>yes, of course"
    )
    assert len(three.session.messages) == 8


def test_turns_come_back(three: Talk) -> None:
    before = three.tokens("x")
    say(three, "/context drop 1 3")
    assert len(three.tokens("x")) < len(before)
    say(three, "/context back")
    assert three.tokens("x") == before
    with pytest.raises(UserError, match="no turn has left"):
        say(three, "/context back")


@pytest.mark.parametrize(
    "line", ["/context drop 4", "/context drop 0", "/context drop x", "/context drop 1 1 9"]
)
def test_only_turns_that_are_there_can_leave(line: str, three: Talk) -> None:
    with pytest.raises(UserError, match="is not in the context") as error:
        say(three, line)
    assert "1, 2, 3" in error.value.hint
    assert three.session.tree.left == set()
    with pytest.raises(UserError, match="unknown argument"):
        say(three, "/context drop")


def test_an_empty_conversation_has_a_context_too(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    say(talk(n_ctx=64), "/context")
    assert "of 64" in capsys.readouterr().out


def test_a_branch_without_the_turn_is_as_it_was(three: Talk) -> None:
    say(three, "/context drop 3")
    say(three, "/switch 2")
    assert three.session.tree.kept() == [1, 2]
    say(three, "/switch main")
    assert three.session.tree.kept() == [1, 2]


def test_what_left_has_left_in_a_saved_chat_and_in_the_log(three: Talk, home: Path) -> None:
    three.log = Log(three.config, three.ui.warn)
    say(three, "/context drop 2")
    three.log.close()
    found = session_log_reader.read(next((home / "state" / "sessions").glob("*.jsonl")))
    assert found.tree.left == {2}
    say(three, "/save x")
    say(three, "/clear")
    say(three, "/load x")
    assert three.session.tree.kept() == [1, 3]
    for wrong in ([9], "all", [1.5]):
        with pytest.raises(turn_records.Damaged):
            turn_records.put_place(Tree(), {"at": 0, "branch": "", "names": {}, "left": wrong})


def test_the_picture_of_the_cells_knows_what_left(three: Talk) -> None:
    def told() -> dict[str, int]:
        found = cache_map.parts(three)
        assert sum(part.cells for part in found) == 400
        return {part.name: part.cells for part in found}

    whole = told()
    gone = len(TURN.format("and the second"))
    say(three, "/context drop 2")
    after = told()
    assert (after["turn 1"], after["free"]) == (whole["turn 1"], whole["free"])
    assert "turn 2" not in after and 0 <= gone - after["not sent again"] < 3
    three.ask("what now?", Stream(silent=True))
    assert list(told()) == ["system", "turn 1", "turn 3", "turn 4", "free"]


def test_cells_have_names_whatever_the_conversation_is(three: Talk, talk: Make) -> None:
    for line in ("/context drop 1 2 3", "/undo", "/undo", "/undo", "/context back", "/clear"):
        with contextlib.suppress(UserError):  # nothing is left to undo
            say(three, line)
        assert sum(part.cells for part in cache_map.parts(three)) == 400
    assert [part.name for part in cache_map.parts(talk())] == ["free"]
    many = talk(b"y", n_ctx=400)
    for number in range(12):
        many.ask(str(number), Stream(silent=True))
    say(many, "/context drop 2")
    assert [part.name for part in cache_map.parts(many)][1].startswith("turns 1-")
