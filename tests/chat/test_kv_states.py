"""/save and /load with the KV state: less prefill, and a message if the state cannot be used."""

from collections.abc import Callable
from pathlib import Path

import pytest

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands import run_command
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.units import format_size
from tests.fixtures.fakes import TEMPLATE

Make = Callable[..., ChatSession]
Out = pytest.CaptureFixture[str]


@pytest.fixture
def saved(talk: Make, tmp_path: Path, capsys: Out) -> tuple[Path, Path]:
    """The model's file, and the state of a chat called trip that was saved with it."""
    model = tmp_path / "model.gguf"
    model.write_bytes(bytes(range(256)) * 1024)
    one = talk(b"yes", path=model, n_seq_max=4)
    one.ask("a?", StreamWriter(silent=True))
    run_command(one, "/save trip")
    out = capsys.readouterr().out
    state = one.config.state / "saved" / "trip.kv"
    transcript = state.with_suffix(".jsonl")
    assert out == (
        f"saved as trip ({transcript}): {format_size(state.stat().st_size + transcript.stat().st_size)},"
        f" with the KV state of {one.runner.engine.ledger.used_cells} tokens\n"
    )
    return model, state


def loaded(talk: Make, model: Path, capsys: Out, **more: object) -> tuple[ChatSession, str]:
    """A new talk that has loaded it, and what was said."""
    one = talk(b"yes", path=model, **{"n_seq_max": 4, **more})
    run_command(one, "/load trip")
    assert [message.content for message in one.conversation.messages] == ["a?", "yes"]
    one.runner.engine.ledger.check()
    told = capsys.readouterr()
    assert told.err == ""
    return one, told.out


def test_a_saved_chat_goes_on_without_prefill(
    talk: Make, saved: tuple[Path, Path], capsys: Out
) -> None:
    one, told = loaded(talk, saved[0], capsys)
    whole = len(one.conversation_tokens())
    assert told == f"loaded trip: 1 turn, {whole - 1} of {whole} tokens in the cache\n"
    assert one.ask("b?", StreamWriter(silent=True)).cached_tokens == whole - 1
    run_command(one, "/load trip")  # what is in the cache still is not read again
    assert one.runner.engine.ledger.used_cells < 2 * whole


def test_the_cells_of_the_conversation_before_are_given_up(
    talk: Make, saved: tuple[Path, Path], capsys: Out
) -> None:
    one = talk(b"yes", path=saved[0], n_seq_max=4)
    one.ask("something else, and long enough to be another conversation", StreamWriter(silent=True))
    run_command(one, "/load trip")
    ledger = one.runner.engine.ledger
    assert ledger.used_cells == len(one.conversation_tokens()) - 1
    ledger.check()


@pytest.mark.parametrize(
    ("spoil", "reason"),
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
def test_without_a_state_that_can_be_used_the_transcript_is_loaded(
    spoil: Callable[[Path, Path], object],
    reason: str,
    talk: Make,
    saved: tuple[Path, Path],
    capsys: Out,
) -> None:
    spoil(*saved)
    one, told = loaded(talk, saved[0], capsys)
    assert told.startswith(f"loaded trip: 1 turn, {reason}")
    assert told.endswith(
        f"; {len(one.conversation_tokens())} tokens are computed with the next message\n"
    )
    assert told.count("\n") == 1
    assert one.ask("b?", StreamWriter(silent=True)).cached_tokens == 0


def test_another_template_and_a_memory_that_refuses_are_told(
    talk: Make, saved: tuple[Path, Path], capsys: Out
) -> None:
    assert (
        "it is of another chat template"
        in loaded(talk, saved[0], capsys, template=TEMPLATE + " ")[1]
    )
    assert "llama.cpp does not accept it" in loaded(talk, saved[0], capsys, word=b"another")[1]
    assert "tokens, but the context holds 16" in loaded(talk, saved[0], capsys, n_ctx=16)[1]


def test_a_disk_that_takes_no_state_keeps_the_transcript(
    talk: Make, saved: tuple[Path, Path], capsys: Out
) -> None:
    model, state = saved
    one, _ = loaded(talk, model, capsys)
    state.unlink()
    state.mkdir()
    run_command(one, "/save trip")
    out = capsys.readouterr().out
    assert "without its KV state: cannot write" in out
    state.rmdir()
    model.write_bytes(b"another")
    run_command(one, "/save trip")
    assert "without its KV state: the model file has changed" in capsys.readouterr().out
    run_command(one, "/clear")
    run_command(one, "/save trip")
    assert "KV state" not in capsys.readouterr().out
