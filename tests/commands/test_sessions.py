"""`llmcli sessions` and `chat --resume`: sessions and saved chats are listed, shown, removed and
resumed.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.cli import Done

Llmcli = Callable[..., Done]
Fake = Callable[..., list[Any]]


def session_names(home: Path) -> list[str]:
    """Return the names of the session files, newest first."""
    paths = sorted(
        (home / "state" / "sessions").glob("*.jsonl"), key=lambda path: -path.stat().st_mtime_ns
    )
    return [path.stem for path in paths]


def age_session(home: Path) -> str:
    """Make the only session file old, rename it accordingly, and return its new name.

    A session's name is its start time, so a chat that starts later gets another name.
    """
    (name,) = session_names(home)
    path = home / "state" / "sessions" / f"{name}.jsonl"
    os.utime(path, (1e9, 1e9))
    path.rename(path.with_name("20010909T014640-1.jsonl"))
    return "20010909T014640-1"


def test_the_last_session_is_resumed_with_its_model_and_settings(
    llmcli: Llmcli, fake: Fake, home: Path
) -> None:
    opened = fake(b"yes")
    llmcli("chat", "fake", "-sys", "Be brief.", "--temp", "0.5", stdin=b"a?\nb?\n/undo\n")
    name = age_session(home)
    done = llmcli("chat", "--resume", stdin=b"c?\n/set temp\n/system\n")
    assert (done.code, done.out.splitlines()[0][:28]) == (0, f"loaded {name}: 1 "[:28])
    assert "it was saved without a KV state; " in done.out
    assert "Be brief." in done.out
    assert " 0.5 " in done.out
    assert session_names(home) == [name]
    assert b"<system>Be brief.\n<user>a?\n<assistant>yes\n<user>c?\n" in bytes(
        token for token in opened[1].engine.ledger.tokens[0] if token < 256
    )
    shown = llmcli("sessions", "show", "last")
    assert shown.out.splitlines()[1:] == [
        "",
        "[system] Be brief.",
        "",
        ">>> a?",
        "",
        "yes",
        "",
        ">>> c?",
        "",
        "yes",
    ]
    assert "1 turn on other branches" in shown.err


def test_flags_override_the_settings_of_a_resumed_session(
    llmcli: Llmcli, fake: Fake, home: Path
) -> None:
    fake(b"yes")
    llmcli("chat", "fake", "-sys", "Be brief.", "--temp", "0.5", "-n", "7", stdin=b"a?\n")
    name = age_session(home)
    line = ["fake", "--resume", name, "-sys", "", "--temp", "0.25", "-n", "-1"]
    done = llmcli("chat", *line, stdin=b"/set temp\n/set predict\n/system\n")
    assert " 0.25 " in done.out
    assert " -1 " in done.out
    assert "no system text is set" in done.out


def test_a_saved_chat_is_resumed_with_its_kv_state(llmcli: Llmcli, fake: Fake, home: Path) -> None:
    fake(b"yes")
    llmcli("chat", "fake", stdin=b"a?\n/save trip\n")
    age_session(home)
    done = llmcli("chat", "fake", "--resume", "trip", stdin=b"b?\n/regen\n/tree\n")
    assert done.out.startswith("loaded trip: 1 turn, 24 of 25 tokens in the cache\n")
    assert len(session_names(home)) == 2  # a resumed saved chat is written to a new session
    rows = json.loads(llmcli("sessions", "--json").out)
    assert sorted((row["kind"], row["turns"], row["first"]) for row in rows) == [
        ("saved", 1, "a?"),
        ("sitting", 1, "a?"),
        ("sitting", 3, "a?"),
    ]


def test_sessions_and_saved_chats_are_listed_shown_and_removed(
    llmcli: Llmcli, fake: Fake, home: Path
) -> None:
    assert llmcli("sessions").out == "no conversations yet; llmcli chat starts one\n"
    assert json.loads(llmcli("sessions", "--json").out) == []
    fake(b"a long\nanswer\x1b[2J")
    llmcli("chat", "fake", stdin=b"what?\n/save trip\nmore?\n")
    old = age_session(home)
    llmcli("chat", "fake", stdin=b"other?\n")
    new = session_names(home)[0]
    rows = json.loads(llmcli("sessions", "--json").out)
    assert [row["name"] for row in rows if row["name"] != "trip"] == [new, old]
    (trip,) = (row for row in rows if row["name"] == "trip")
    assert trip["bytes"] == sum(
        path.stat().st_size for path in (home / "state" / "saved").iterdir()
    )
    assert trip["kv_bytes"] == (home / "state" / "saved" / "trip.kv").stat().st_size
    assert (trip["model"], trip["first"]) == ("fake", "what?")
    table = [line.split() for line in llmcli("sessions").out.splitlines()]
    assert table[0][0] == "name"
    assert {row[0] for row in table[1:]} == {new, old, "trip"}
    document = json.loads(llmcli("sessions", "show", old, "--json").out)
    assert [turn["question"] for turn in document["turns"]] == ["what?", "more?"]
    assert (document["at"], document["names"], document["kind"]) == (2, {"main": 2}, "sitting")
    assert "\x1b" not in llmcli("sessions", "show", old).out
    done = llmcli("sessions", "rm", "trip", old)
    assert [line.split(":")[0] for line in done.out.splitlines()] == [
        "removed trip",
        f"removed {old}",
    ]
    assert list((home / "state" / "saved").iterdir()) == []
    assert session_names(home) == [new]


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (
            ["sessions", "show", "trap"],
            "no conversation called 'trap'",
            "mean trip? llmcli sessions lists them",
        ),
        (
            ["sessions", "rm", "trip", "../x"],
            "no conversation called '../x'",
            "llmcli sessions lists them",
        ),
        (
            ["chat", "fake", "--resume", "nowhere"],
            "no conversation called 'nowhere'",
            "llmcli sessions lists them",
        ),
    ],
)
def test_an_unknown_name_is_an_error_and_removes_nothing(
    words: list[str], message: str, hint: str, llmcli: Llmcli, fake: Fake, home: Path
) -> None:
    fake(b"yes")
    llmcli("chat", "fake", stdin=b"a?\n/save trip\n")
    done = llmcli(*words)
    assert done.code == 1
    assert done.err.splitlines()[0] == f"error: {message}"
    assert done.err.splitlines()[1].endswith(hint)
    assert len(list((home / "state" / "saved").iterdir())) == 2


def test_resume_without_a_session_is_an_error(llmcli: Llmcli, fake: Fake) -> None:
    fake(b"yes")
    done = llmcli("chat", "--resume")
    assert (done.code, done.err) == (
        1,
        "error: there is no session to resume yet\nhint: start one with: llmcli chat\n",
    )


def test_resume_names_the_model(llmcli: Llmcli, fake: Fake, home: Path) -> None:
    fake(b"yes")
    llmcli("chat", "fake", stdin=b"a?\n")
    name = age_session(home)
    done = llmcli("chat", "--resume", name, stdin=b"")
    assert (
        f"{name}: resumed with fake (with another model: llmcli chat REF --resume {name})\n"
        in done.err
    )


def test_a_damaged_saved_chat_is_listed_with_a_warning(
    llmcli: Llmcli, fake: Fake, home: Path
) -> None:
    fake(b"yes")
    llmcli("chat", "fake", stdin=b"a?\n/save trip\n")
    (home / "state" / "saved" / "trip.jsonl").write_text("{")
    done = llmcli("sessions", "--json")
    assert [row["turns"] for row in json.loads(done.out)] == [0, 1]
    assert "trip: " in done.err
    assert llmcli("chat", "fake", "--resume", "trip").code == 1


def test_a_session_in_use_is_not_removed(llmcli: Llmcli, fake: Fake, home: Path) -> None:
    from llmcli import config
    from llmcli.chat.conversation.conversation import Conversation
    from llmcli.chat.conversation.session_log import SessionLog
    from llmcli.runtime.sampling import default_sampling

    fake(b"yes")
    llmcli("chat", "fake", stdin=b"a?\n")
    name = age_session(home)
    log = SessionLog(
        config.load_config(), pytest.fail, home / "state" / "sessions" / f"{name}.jsonl"
    )
    assert log.resume(Conversation(default_sampling()))
    done = llmcli("sessions", "rm", name)
    assert (done.code, done.err.splitlines()[0]) == (1, f"error: {name} is in use")
    second_chat = llmcli("chat", "fake", "--resume", name, stdin=b"b?\n")
    assert "another chat is using that session" in second_chat.err
    assert len(session_names(home)) == 2
    log.close()


def test_a_last_line_without_a_newline_is_answered(llmcli: Llmcli, fake: Fake, home: Path) -> None:
    fake(b"yes")
    done = llmcli("chat", "fake", stdin=b"one\ntwo")
    assert (done.code, done.out) == (0, "yes\nyes\n")
    broken = llmcli("chat", "fake", stdin=b"one\ntw\xc3")
    assert (broken.code, broken.out) == (1, "yes\n")
    assert "error: stdin is not UTF-8 text: byte 6 is 0xc3" in broken.err
    assert llmcli("chat", "fake", stdin=b'"""\nhalf a fence').out == "yes\n"


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 140])
def test_the_name_of_a_session_can_be_copied_whole(
    columns: int, llmcli: Llmcli, fake: Fake, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(b"yes")
    saved = "a-saved-chat-with-a-name-of-38-letters"
    llmcli("chat", "fake", stdin=f"What is a long question?\n/save {saved}\n".encode())
    monkeypatch.setattr("llmcli.ui.terminal_columns", lambda stream: columns)
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True, raising=False)
    lines = llmcli("sessions").out.splitlines()
    for name in (*session_names(home), saved):
        assert any(name in line for line in lines), lines
