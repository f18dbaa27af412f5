"""/read, /export and /copy."""

import base64
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmcli.chat import clipboard
from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands import run_command
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.chat.input_loop import handle_line
from llmcli.errors import UserError
from tests.chat.terminal.test_completion import completed_lines

MakeChat = Callable[..., ChatSession]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_read_sends_a_file_only_with_the_next_message(
    make_chat: MakeChat, folder: Path, capsys: Capture
) -> None:
    chat = make_chat(b"yes")
    (folder / "notes.txt").write_text("\ufeffone\ntwo", encoding="utf-8")
    run_command(chat, "/read notes.txt")
    assert "notes.txt: " in capsys.readouterr().out
    run_command(chat, "/read")
    assert capsys.readouterr().out == "--- File: notes.txt ---\n"
    handle_line(chat, "What?")
    handle_line(chat, "And?")
    assert [m.content for m in chat.conversation.messages[::2]] == [
        "--- File: notes.txt ---\none\ntwo\nWhat?",
        "And?",
    ]


def test_read_with_a_question_asks_at_once(make_chat: MakeChat, folder: Path) -> None:
    chat = make_chat(b"yes")
    (folder / "my notes.txt").write_text("text")
    run_command(chat, "/read 'my notes.txt' What is it?")
    run_command(chat, f"/read {folder}/my notes.txt")  # the complete argument is the name of a file
    assert [m.content for m in chat.conversation.messages[::2]] == [
        "--- File: my notes.txt ---\ntext\nWhat is it?"
    ]
    assert len(chat.attachments) == 1
    run_command(chat, "/read -")
    assert chat.attachments == []


def test_read_raises_an_error_for_a_file_that_cannot_be_sent(
    make_chat: MakeChat, folder: Path
) -> None:
    (folder / "latin1.txt").write_bytes(b"caf\xe9")
    (folder / "long.txt").write_text("word " * 60)
    (folder / "huge.txt").write_bytes(b"x" * 10_000)
    os.mkfifo(folder / "pipe")
    chat = make_chat(n_ctx=256)
    for name, reason in (
        ("nothing.txt", "No such file"),
        (".", "is a folder"),
        ("latin1.txt", "byte 3 is 0xe9"),
        ("pipe", "not a regular"),
        ("long.txt", "has 324 tokens, but the context holds 256"),
        ("huge.txt", "are 4098 tokens, but the context holds 256"),
        ("a\0b", "is not a file name"),
        ("~nobody-at-all/x", "no such home"),
    ):
        with pytest.raises(UserError, match=reason) as error:
            run_command(chat, f"/read {name}")
        assert error.value.hint
    assert chat.attachments == []


def test_tab_completes_paths(make_chat: MakeChat, folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "a b.txt").touch()
    (folder / ".hidden").touch()
    (folder / "summary.txt").touch()
    chat = make_chat()
    assert completed_lines(chat, "/read ") == ["/read sub/", "/read summary.txt"]
    assert completed_lines(chat, "/read sub/a") == ["/read sub/a b.txt"]
    assert completed_lines(chat, "/read sub/a b") == ["/read sub/a b.txt"]
    assert completed_lines(chat, "/read .h") == ["/read .hidden"]
    assert completed_lines(chat, "/read no/such/") == []
    assert completed_lines(chat, "/export m") == ["/export md"]
    assert completed_lines(chat, "/export json su") == [
        "/export json sub/",
        "/export json summary.txt",
    ]


def test_export_prints_or_writes_the_conversation(
    make_chat: MakeChat, folder: Path, capsys: Capture
) -> None:
    chat = make_chat()
    chat.conversation.system = "Be brief."
    chat.conversation.add_turn("a?", "yes \x1b[2J\x9b", "cancelled")
    run_command(chat, "/export md")
    markdown = capsys.readouterr().out
    assert markdown.splitlines()[0] == "# A chat with fake"
    assert (
        "## System\n\nBe brief.\n\n## User\n\na?\n\n## Assistant\n\nyes ␛[2J�\n\n*(stopped here)*"
        in markdown
    )
    run_command(chat, "/export md talk.md")
    assert (folder / "talk.md").read_text(encoding="utf-8") == markdown
    assert (folder / "talk.md").stat().st_mode & 0o077 == 0
    capsys.readouterr()
    run_command(chat, "/export json")
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert json.loads(out)["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "yes \x1b[2J\x9b", "cut": True},
    ]


def test_export_does_not_replace_files(make_chat: MakeChat, folder: Path) -> None:
    chat = make_chat(b"yes")
    (folder / "talk.md").write_text("mine")
    for line, reason in (
        ("md talk.md", "already exists"),
        ("md .", "already exists"),
        ("md no/such/talk.md", "no such folder"),
        ("pdf", "unknown export format 'pdf'"),
        ("", "needs a form"),
    ):
        with pytest.raises(UserError, match=reason) as error:
            run_command(chat, f"/export {line}")
        assert error.value.hint
    assert [path.name for path in folder.iterdir()] == ["talk.md"]
    assert (folder / "talk.md").read_text() == "mine"


def test_copy_sends_the_last_answer_to_the_terminal(
    make_chat: MakeChat, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    chat = make_chat("grün\x1b[0m".encode())
    with pytest.raises(UserError, match="no answer yet"):
        run_command(chat, "/copy")
    chat.ask("x", StreamWriter(silent=True))
    with pytest.raises(UserError, match="needs a terminal") as error:
        run_command(chat, "/copy")
    assert "/export" in error.value.hint
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(clipboard, "PROGRAMS", ())
    run_command(chat, "/copy")
    sequence, message = capsys.readouterr().out.split("\x07")
    assert base64.b64decode(sequence.removeprefix("\x1b]52;c;")).decode() == "grün\x1b[0m"
    assert message == "copied 8 characters with the terminal, if it allows that (OSC 52)\n"
    chat.conversation.add_turn("y", "x" * 60_000, "stop")
    with pytest.raises(UserError, match="60000 characters, too many"):
        run_command(chat, "/copy")


def test_copy_uses_the_first_program_that_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "clipboard"
    for name, script in (("fails", "exit 1"), ("works", f"cat > {out}")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(clipboard, "PROGRAMS", (("is-not-here",), ("fails",), ("works", "--now")))
    assert clipboard.copy_text("grün") == "works"
    assert out.read_text(encoding="utf-8") == "grün"
    monkeypatch.setattr(clipboard, "PROGRAMS", (("fails",),))
    assert clipboard.copy_text("grün") is None
