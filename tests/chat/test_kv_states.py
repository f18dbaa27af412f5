"""/save and /load with the KV state, and the message if it cannot be used."""

from collections.abc import Callable
from pathlib import Path

import pytest

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands import run_command
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.units import format_size
from tests.fixtures.fakes import TEMPLATE

MakeChat = Callable[..., ChatSession]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def saved_chat(make_chat: MakeChat, tmp_path: Path, capsys: Capture) -> tuple[Path, Path]:
    """Save a chat called trip. Return the paths of its model and of its KV state."""
    model = tmp_path / "model.gguf"
    model.write_bytes(bytes(range(256)) * 1024)
    chat = make_chat(b"yes", path=model, n_seq_max=4)
    chat.ask("a?", StreamWriter(silent=True))
    run_command(chat, "/save trip")
    out = capsys.readouterr().out
    state = chat.config.state / "saved" / "trip.kv"
    transcript = state.with_suffix(".jsonl")
    assert out == (
        f"saved as trip ({transcript}): {format_size(state.stat().st_size + transcript.stat().st_size)},"
        f" with the KV state of {chat.runner.engine.ledger.used_cells} tokens\n"
    )
    return model, state


def load_chat(
    make_chat: MakeChat, model: Path, capsys: Capture, **more: object
) -> tuple[ChatSession, str]:
    """Load the chat called trip into a new session. Return the session and the output."""
    chat = make_chat(b"yes", path=model, **{"n_seq_max": 4, **more})
    run_command(chat, "/load trip")
    assert [message.content for message in chat.conversation.messages] == ["a?", "yes"]
    chat.runner.engine.ledger.check()
    output = capsys.readouterr()
    assert output.err == ""
    return chat, output.out


def test_a_loaded_chat_continues_without_prefill(
    make_chat: MakeChat, saved_chat: tuple[Path, Path], capsys: Capture
) -> None:
    chat, output = load_chat(make_chat, saved_chat[0], capsys)
    n_tokens = len(chat.conversation_tokens())
    assert output == f"loaded trip: 1 turn, {n_tokens - 1} of {n_tokens} tokens in the cache\n"
    assert chat.ask("b?", StreamWriter(silent=True)).cached_tokens == n_tokens - 1
    run_command(chat, "/load trip")  # the state is not read again if it is in the cache
    assert chat.runner.engine.ledger.used_cells < 2 * n_tokens


def test_loading_a_chat_frees_the_cells_of_the_previous_conversation(
    make_chat: MakeChat, saved_chat: tuple[Path, Path], capsys: Capture
) -> None:
    chat = make_chat(b"yes", path=saved_chat[0], n_seq_max=4)
    chat.ask(
        "something else, and long enough to be another conversation", StreamWriter(silent=True)
    )
    run_command(chat, "/load trip")
    ledger = chat.runner.engine.ledger
    assert ledger.used_cells == len(chat.conversation_tokens()) - 1
    ledger.check()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda model, state: state.unlink(), "it was saved without a KV state"),
        (
            lambda model, state: state.write_bytes(state.read_bytes()[:-1]),
            "its KV state is not used: it is damaged",
        ),
        (lambda model, state: state.write_bytes(b""), "its KV state is not used: it is damaged"),
        (
            lambda model, state: (state.unlink(), state.mkdir()),
            "its KV state cannot be read (Is a directory)",
        ),
        (
            lambda model, state: model.write_bytes(bytes(300_000)),
            "its KV state is not used: it is of another model",
        ),
    ],
)
def test_without_a_usable_kv_state_only_the_conversation_is_loaded(
    damage: Callable[[Path, Path], object],
    reason: str,
    make_chat: MakeChat,
    saved_chat: tuple[Path, Path],
    capsys: Capture,
) -> None:
    damage(*saved_chat)
    chat, output = load_chat(make_chat, saved_chat[0], capsys)
    assert output.startswith(f"loaded trip: 1 turn, {reason}")
    assert output.endswith(
        f"; {len(chat.conversation_tokens())} tokens are computed with the next message\n"
    )
    assert output.count("\n") == 1
    assert chat.ask("b?", StreamWriter(silent=True)).cached_tokens == 0


def test_the_reason_why_a_kv_state_is_not_used_is_printed(
    make_chat: MakeChat, saved_chat: tuple[Path, Path], capsys: Capture
) -> None:
    assert (
        "it is of another chat template"
        in load_chat(make_chat, saved_chat[0], capsys, template=TEMPLATE + " ")[1]
    )
    assert (
        "llama.cpp does not accept it"
        in load_chat(make_chat, saved_chat[0], capsys, word=b"another")[1]
    )
    assert (
        "tokens, but the context holds 16"
        in load_chat(make_chat, saved_chat[0], capsys, n_ctx=16)[1]
    )


def test_a_chat_is_saved_even_if_its_kv_state_cannot_be_written(
    make_chat: MakeChat, saved_chat: tuple[Path, Path], capsys: Capture
) -> None:
    model, state = saved_chat
    chat, _ = load_chat(make_chat, model, capsys)
    state.unlink()
    state.mkdir()
    run_command(chat, "/save trip")
    out = capsys.readouterr().out
    assert "without its KV state: cannot write" in out
    state.rmdir()
    model.write_bytes(b"another")
    run_command(chat, "/save trip")
    assert "without its KV state: the model file has changed" in capsys.readouterr().out
    run_command(chat, "/clear")
    run_command(chat, "/save trip")
    assert "KV state" not in capsys.readouterr().out
