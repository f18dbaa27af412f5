"""/context: listing, dropping and restoring turns."""

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

MakeChat = Callable[..., ChatSession]
TURN = "<user>{}\n<assistant>yes, of course\n"


@pytest.fixture
def chat(make_chat: MakeChat) -> ChatSession:
    """A chat with a system text and three turns."""
    chat = make_chat(b"yes, of course", n_ctx=400)
    chat.conversation.system = "be kind"
    for question in ("the first thing", "and the second", "and the third one"):
        chat.ask(question, StreamWriter(silent=True))
    return chat


def cached_text(chat: ChatSession) -> bytes:
    """Return the text in the KV cache."""
    return bytes(token for token in chat.runner.engine.ledger.tokens[0] if token < 256)


def test_context_lists_every_turn_with_its_tokens(
    chat: ChatSession, capsys: pytest.CaptureFixture[str]
) -> None:
    handle_line(chat, "/context")
    output = capsys.readouterr().out
    lines = {line.split("  ")[0].strip(): line for line in output.splitlines()}
    for number, question in enumerate(
        ("the first thing", "and the second", "and the third one"), 1
    ):
        assert f" {len(TURN.format(question))} " in lines[f"turn {number}"]
        assert question in lines[f"turn {number}"]
    assert "next to leave" in lines["turn 1"]
    n_tokens = chat.token_count()
    assert f" {n_tokens} " in lines["total"] and f" {400 - n_tokens} " in lines["free"]
    handle_line(chat, "/context drop 2")
    assert (
        f"turn 2 left the context ({len(TURN.format('and the second'))} tokens)"
        in capsys.readouterr().out
    )
    handle_line(chat, "/context")
    output = capsys.readouterr().out
    assert "and the second" not in output and "turn 2 left the context" in output


def test_a_dropped_turn_is_not_sent_again_and_the_others_are_not_recomputed(
    chat: ChatSession,
) -> None:
    handle_line(chat, "/context drop 1")
    answer = chat.ask("still there?", StreamWriter(silent=True))
    chat.runner.engine.ledger.check()
    assert cached_text(chat) == (
        b"<system>be kind\n"
        + "".join(TURN.format(q) for q in ("and the second", "and the third one")).encode()
        + b"<user>still there?\n<assistant>yes, of course"
    )
    assert answer.cached_tokens >= len(cached_text(chat)) - len(
        "\n<user>still there?\n<assistant>yes, of course"
    )
    assert len(chat.conversation.messages) == 8


def test_context_back_restores_dropped_turns(chat: ChatSession) -> None:
    before = chat.prompt_tokens("x")
    handle_line(chat, "/context drop 1 3")
    assert len(chat.prompt_tokens("x")) < len(before)
    handle_line(chat, "/context back")
    assert chat.prompt_tokens("x") == before
    with pytest.raises(UserError, match="no turn has left"):
        handle_line(chat, "/context back")


@pytest.mark.parametrize(
    "line", ["/context drop 4", "/context drop 0", "/context drop x", "/context drop 1 1 9"]
)
def test_dropping_a_missing_turn_raises_an_error(line: str, chat: ChatSession) -> None:
    with pytest.raises(UserError, match="is not in the context") as error:
        handle_line(chat, line)
    assert "1, 2, 3" in error.value.hint
    assert chat.conversation.tree.dropped == set()
    with pytest.raises(UserError, match="unknown argument"):
        handle_line(chat, "/context drop")


def test_context_of_an_empty_conversation(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    handle_line(make_chat(n_ctx=64), "/context")
    assert "of 64" in capsys.readouterr().out


def test_a_dropped_turn_does_not_affect_branches_without_it(chat: ChatSession) -> None:
    handle_line(chat, "/context drop 3")
    handle_line(chat, "/switch 2")
    assert chat.conversation.tree.sent_turns() == [1, 2]
    handle_line(chat, "/switch main")
    assert chat.conversation.tree.sent_turns() == [1, 2]


def test_dropped_turns_are_stored_in_saved_chats_and_logs(chat: ChatSession, home: Path) -> None:
    chat.log = SessionLog(chat.config, chat.ui.warn)
    handle_line(chat, "/context drop 2")
    chat.log.close()
    stored = session_log_reader.read_log(next((home / "state" / "sessions").glob("*.jsonl")))
    assert stored.tree.dropped == {2}
    handle_line(chat, "/save x")
    handle_line(chat, "/clear")
    handle_line(chat, "/load x")
    assert chat.conversation.tree.sent_turns() == [1, 3]
    for dropped in ([9], "all", [1.5]):
        with pytest.raises(turn_records.DamagedRecord):
            turn_records.restore_position(
                TurnTree(), {"at": 0, "branch": "", "names": {}, "left": dropped}
            )


def test_cache_segments_show_dropped_turns(chat: ChatSession) -> None:
    def segment_cells() -> dict[str, int]:
        segments = cache_map.cache_segments(chat)
        assert sum(segment.cells for segment in segments) == 400
        return {segment.name: segment.cells for segment in segments}

    before = segment_cells()
    n_dropped = len(TURN.format("and the second"))
    handle_line(chat, "/context drop 2")
    after = segment_cells()
    assert (after["turn 1"], after["free"]) == (before["turn 1"], before["free"])
    assert "turn 2" not in after and 0 <= n_dropped - after["not sent again"] < 3
    chat.ask("what now?", StreamWriter(silent=True))
    assert list(segment_cells()) == ["system", "turn 1", "turn 3", "turn 4", "free"]


def test_cache_segments_cover_all_cells_of_any_conversation(
    chat: ChatSession, make_chat: MakeChat
) -> None:
    for line in ("/context drop 1 2 3", "/undo", "/undo", "/undo", "/context back", "/clear"):
        with contextlib.suppress(UserError):  # there is no turn to undo
            handle_line(chat, line)
        assert sum(segment.cells for segment in cache_map.cache_segments(chat)) == 400
    assert [segment.name for segment in cache_map.cache_segments(make_chat())] == ["free"]
    long_chat = make_chat(b"y", n_ctx=400)
    for number in range(12):
        long_chat.ask(str(number), StreamWriter(silent=True))
    handle_line(long_chat, "/context drop 2")
    assert [segment.name for segment in cache_map.cache_segments(long_chat)][1].startswith(
        "turns 1-"
    )
