"""/context: the turns that are sent to the model."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from llmcli.chat import cache_map
from llmcli.chat.chat_session import ChatSession
from llmcli.chat.conversation import session_log_reader, turn_records
from llmcli.chat.conversation.session_log import SessionLog
from llmcli.chat.conversation.turn_tree import TurnTree
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.chat.input_loop import handle_line
from llmcli.errors import UserError

Make = Callable[..., ChatSession]
TURN = "<user>{}\n<assistant>yes, of course\n"


@pytest.fixture
def three(talk: Make) -> ChatSession:
    one = talk(b"yes, of course", n_ctx=400)
    one.conversation.system = "be kind"
    for question in ("the first thing", "and the second", "and the third one"):
        one.ask(question, StreamWriter(silent=True))
    return one


def sent(talk: ChatSession) -> bytes:
    return bytes(token for token in talk.runner.engine.ledger.tokens[0] if token < 256)


def test_every_turn_is_listed_with_its_tokens(
    three: ChatSession, capsys: pytest.CaptureFixture[str]
) -> None:
    handle_line(three, "/context")
    told = capsys.readouterr().out
    lines = {line.split("  ")[0].strip(): line for line in told.splitlines()}
    for number, question in enumerate(
        ("the first thing", "and the second", "and the third one"), 1
    ):
        assert f" {len(TURN.format(question))} " in lines[f"turn {number}"]
        assert question in lines[f"turn {number}"]
    assert "next to leave" in lines["turn 1"]
    held_now = three.token_count()
    assert f" {held_now} " in lines["total"] and f" {400 - held_now} " in lines["free"]
    handle_line(three, "/context drop 2")
    assert (
        f"turn 2 left the context ({len(TURN.format('and the second'))} tokens)"
        in capsys.readouterr().out
    )
    handle_line(three, "/context")
    told = capsys.readouterr().out
    assert "and the second" not in told and "turn 2 left the context" in told


def test_a_dropped_turn_is_not_sent_again_and_what_stays_is_not_computed_again(
    three: ChatSession,
) -> None:
    handle_line(three, "/context drop 1")
    answer = three.ask("still there?", StreamWriter(silent=True))
    three.runner.engine.ledger.check()
    assert sent(three) == (
        b"<system>be kind\n"
        + "".join(TURN.format(q) for q in ("and the second", "and the third one")).encode()
        + b"<user>still there?\n<assistant>yes, of course"
    )
    assert answer.cached_tokens >= len(sent(three)) - len(
        "\n<user>still there?\n<assistant>yes, of course"
    )
    assert len(three.conversation.messages) == 8


def test_turns_come_back(three: ChatSession) -> None:
    before = three.prompt_tokens("x")
    handle_line(three, "/context drop 1 3")
    assert len(three.prompt_tokens("x")) < len(before)
    handle_line(three, "/context back")
    assert three.prompt_tokens("x") == before
    with pytest.raises(UserError, match="no turn has left"):
        handle_line(three, "/context back")


@pytest.mark.parametrize(
    "line", ["/context drop 4", "/context drop 0", "/context drop x", "/context drop 1 1 9"]
)
def test_only_turns_that_are_there_can_leave(line: str, three: ChatSession) -> None:
    with pytest.raises(UserError, match="is not in the context") as error:
        handle_line(three, line)
    assert "1, 2, 3" in error.value.hint
    assert three.conversation.tree.dropped == set()
    with pytest.raises(UserError, match="unknown argument"):
        handle_line(three, "/context drop")


def test_an_empty_conversation_has_a_context_too(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    handle_line(talk(n_ctx=64), "/context")
    assert "of 64" in capsys.readouterr().out


def test_a_branch_without_the_turn_is_as_it_was(three: ChatSession) -> None:
    handle_line(three, "/context drop 3")
    handle_line(three, "/switch 2")
    assert three.conversation.tree.sent_turns() == [1, 2]
    handle_line(three, "/switch main")
    assert three.conversation.tree.sent_turns() == [1, 2]


def test_what_left_has_left_in_a_saved_chat_and_in_the_log(three: ChatSession, home: Path) -> None:
    three.log = SessionLog(three.config, three.ui.warn)
    handle_line(three, "/context drop 2")
    three.log.close()
    found = session_log_reader.read_log(next((home / "state" / "sessions").glob("*.jsonl")))
    assert found.tree.dropped == {2}
    handle_line(three, "/save x")
    handle_line(three, "/clear")
    handle_line(three, "/load x")
    assert three.conversation.tree.sent_turns() == [1, 3]
    for wrong in ([9], "all", [1.5]):
        with pytest.raises(turn_records.DamagedRecord):
            turn_records.restore_position(
                TurnTree(), {"at": 0, "branch": "", "names": {}, "left": wrong}
            )


def test_the_picture_of_the_cells_knows_what_left(three: ChatSession) -> None:
    def told() -> dict[str, int]:
        found = cache_map.cache_segments(three)
        assert sum(part.cells for part in found) == 400
        return {part.name: part.cells for part in found}

    whole = told()
    gone = len(TURN.format("and the second"))
    handle_line(three, "/context drop 2")
    after = told()
    assert (after["turn 1"], after["free"]) == (whole["turn 1"], whole["free"])
    assert "turn 2" not in after and 0 <= gone - after["not sent again"] < 3
    three.ask("what now?", StreamWriter(silent=True))
    assert list(told()) == ["system", "turn 1", "turn 3", "turn 4", "free"]


def test_cells_have_names_whatever_the_conversation_is(three: ChatSession, talk: Make) -> None:
    for line in ("/context drop 1 2 3", "/undo", "/undo", "/undo", "/context back", "/clear"):
        with contextlib.suppress(UserError):  # nothing is left to undo
            handle_line(three, line)
        assert sum(part.cells for part in cache_map.cache_segments(three)) == 400
    assert [part.name for part in cache_map.cache_segments(talk())] == ["free"]
    many = talk(b"y", n_ctx=400)
    for number in range(12):
        many.ask(str(number), StreamWriter(silent=True))
    handle_line(many, "/context drop 2")
    assert [part.name for part in cache_map.cache_segments(many)][1].startswith("turns 1-")
