"""Session logs: writing, reading, resuming, and damaged or truncated files."""

import fcntl
import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmcli import config
from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands import run_command
from llmcli.chat.conversation import session_log, session_log_reader
from llmcli.chat.conversation.conversation import Conversation
from llmcli.chat.conversation.session_log import SessionLog, is_in_use
from llmcli.chat.conversation.turn_tree import TurnTree
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.chat.input_loop import handle_line
from llmcli.errors import UserError
from llmcli.runtime.sampling import default_sampling
from llmcli.types import Event
from tests.fixtures.full_disk import full_disk

MakeChat = Callable[..., ChatSession]


@pytest.fixture
def logged_chat(make_chat: MakeChat) -> Callable[..., tuple[ChatSession, Path]]:
    """Return a function that makes a chat with a session log, and returns both."""

    def make(*reply: Any, **more: Any) -> tuple[ChatSession, Path]:
        chat = make_chat(*reply, **more)
        log = chat.log = SessionLog(chat.config, pytest.fail)
        return chat, log.path

    return make


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_answer_is_one_line_with_its_question_and_settings(
    logged_chat: Callable[..., tuple[ChatSession, Path]],
) -> None:
    chat, path = logged_chat(b"yes")
    chat.ask("a?", StreamWriter(silent=True))
    chat.ask("b?", StreamWriter(silent=True))
    questions = [(line["turn"], line["prompt"], line["text"]) for line in records(path)]
    assert questions == [(1, "a?", "yes"), (2, "b?", "yes")]
    for line in records(path):
        assert {"model", "text", "finish", "tokens", "timing", "kv", "seed"} <= set(line)
    assert records(path)[0]["settings"]["temp"] == 0
    assert path.stat().st_mode & 0o077 == 0


def test_the_question_is_on_the_disk_before_the_answer(
    logged_chat: Callable[..., tuple[ChatSession, Path]],
) -> None:
    chat, path = logged_chat(b"yes")
    seen: list[session_log_reader.StoredConversation] = []
    chat.runner.context.before = lambda number: seen.append(session_log_reader.read_log(path))  # type: ignore[attr-defined]
    chat.ask('the "time": "x" {question}\n', StreamWriter(silent=True))
    assert seen
    for stored in seen:
        assert (stored.pending_message, stored.tree.turns, stored.n_damaged) == (
            'the "time": "x" {question}\n',
            [],
            0,
        )
    assert session_log_reader.read_log(path).tree == chat.conversation.tree


def test_a_question_whose_answer_failed_is_recorded_as_unanswered(
    logged_chat: Callable[..., tuple[ChatSession, Path]],
) -> None:
    class Broken(StreamWriter):
        def write_event(self, event: Event) -> None:
            raise UserError("cannot write the output")

    chat, path = logged_chat(b"yes")
    with pytest.raises(UserError):
        chat.ask("a?", Broken())
    assert records(path)[0]["event"] == "unanswered"
    assert session_log_reader.read_log(path).pending_message == "a?"
    chat.ask("b?", StreamWriter(silent=True))
    stored = session_log_reader.read_log(path)
    assert (stored.pending_message, stored.tree) == (None, chat.conversation.tree)


@pytest.mark.parametrize("seed", range(25))
def test_the_log_of_random_commands_gives_the_same_conversation(
    seed: int,
    logged_chat: Callable[..., tuple[ChatSession, Path]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    rng = random.Random(seed)
    chat, path = logged_chat(b"ja", n_ctx=2048, n_seq_max=4)
    for step in range(30):
        turns = len(chat.conversation.tree.turns)
        line = rng.choice(
            (
                f"question {step}",
                f"question {step}",
                "/undo",
                "/regen",
                f"/edit {step}x",
                f"/edit 1 {step}x",
                f"/branch b{step}",
                f"/switch {rng.randint(0, turns + 1)}",
                "/switch main",
                "/save a",
                "/load a",
                "/clear",
                "/set temp 0.5",
                "/system Be brief.",
            )
        )
        try:
            handle_line(chat, line)
        except UserError:
            continue
        stored = (
            session_log_reader.read_log(path)
            if path.exists()
            else session_log_reader.StoredConversation(TurnTree())
        )
        assert (stored.tree, stored.n_damaged, stored.pending_message) == (
            chat.conversation.tree,
            0,
            None,
        ), line
        assert stored.model == ("fake" if stored.tree.turns else stored.model)
        chat.runner.engine.ledger.check()
    if path.exists():
        resumed_conversation = Conversation(default_sampling())
        session_log_reader.read_log(path).restore_into(resumed_conversation)
        assert resumed_conversation.messages == chat.conversation.messages
        assert all(("event" in line) != ("text" in line) for line in records(path))


def test_dropped_turns_are_read_from_the_log(
    logged_chat: Callable[..., tuple[ChatSession, Path]],
) -> None:
    chat, path = logged_chat(b"0123456789 and some more words", n_ctx=128, n_seq_max=4)
    handle_line(chat, "/set on_full shift")
    for number in range(6):
        handle_line(chat, f"question {number}?")
    handle_line(chat, "/switch 5")
    stored = session_log_reader.read_log(path)
    assert chat.conversation.tree.dropped
    assert (stored.tree, stored.on_full, stored.n_damaged) == (chat.conversation.tree, "shift", 0)
    handle_line(chat, "/save a")
    handle_line(chat, "/load a")
    assert session_log_reader.read_log(path).tree == chat.conversation.tree == stored.tree
    assert chat.conversation.on_full == "shift"


def test_the_constraint_is_recorded_when_it_changes(
    logged_chat: Callable[..., tuple[ChatSession, Path]],
) -> None:
    chat, path = logged_chat(b"yes", n_seq_max=2)
    form, grammar = '/set format {"enum": ["ja"]}', '/set grammar root ::= "o"'
    for line in (form, "a?", "b?", "/set format none", "c?", grammar, "d?"):
        handle_line(chat, line)
    assert ["format" in line for line in records(path)] == [True, False, True, True]
    stored = session_log_reader.read_log(path)
    assert (stored.constraint, stored.has_constraint) == (chat.conversation.constraint, True)
    text = path.read_text().splitlines()
    path.write_text(
        "\n".join(text[:2]) + "\n" + text[2].partition('"model"')[0]
    )  # as if killed during the third answer
    stored = session_log_reader.read_log(path)
    assert (stored.constraint, stored.has_constraint, stored.pending_message) == (None, True, "c?")


def test_a_truncated_log_gives_all_complete_lines(
    logged_chat: Callable[..., tuple[ChatSession, Path]],
) -> None:
    chat, path = logged_chat(b"yes")
    for text in ("a?", "ü?", "c?"):
        handle_line(chat, text)
    handle_line(chat, "/undo")
    complete = path.read_bytes()
    rows = complete.splitlines(keepends=True)
    ends = [sum(map(len, rows[:count])) for count in range(len(rows) + 1)]
    for cut in range(0, len(complete), 7):
        path.write_bytes(complete[:cut])
        stored = session_log_reader.read_log(path)
        count = sum(end <= cut for end in ends) - 1
        assert len(stored.tree.turns) == min(count, 3)
        assert stored.n_damaged == 0
        if stored.pending_message:
            assert stored.pending_message == ("a?", "ü?", "c?")[count]


def test_damaged_lines_are_skipped_and_counted(
    logged_chat: Callable[..., tuple[ChatSession, Path]],
) -> None:
    chat, path = logged_chat(b"yes")
    for text in ("a?", "b?", "c?", "/switch 1", "d?", "/branch x", "/undo"):
        handle_line(chat, text)
    raw = path.read_bytes().splitlines()
    raw[1] = raw[1][:-40]
    raw += [b'{"event": "tree", "turns": [3]}', b'{"event": 7}', b""]
    path.write_bytes(b"\n".join([b"{}", b"\xff", b"[1]", *raw]))
    stored = session_log_reader.read_log(path)
    assert stored.n_damaged == 6
    assert [turn.question for turn in stored.tree.turns] == ["a?", "c?", "d?"]
    assert [turn.parent for turn in stored.tree.turns] == [
        0,
        1,
        1,
    ]  # the parent of c? is the last turn before it that could be read
    assert (stored.tree.current_turn, stored.tree.current_branch, stored.pending_message) == (
        1,
        "x",
        None,
    )


def test_logs_without_a_tree_are_read(home: Path) -> None:
    path = home / "old.jsonl"
    replies = [("a?", 1, "A"), ("b?", 2, "B"), ("b?", 2, "B2"), ("c?", 3, "C"), ("anew", 1, "N")]
    path.write_text(
        "".join(
            json.dumps(
                {
                    "model": {"name": "m"},
                    "text": text,
                    "finish": "cancelled",
                    "prompt": prompt,
                    "turn": turn,
                }
            )
            + "\n"
            for prompt, turn, text in replies
        )
    )
    stored = session_log_reader.read_log(path)
    assert [(turn.parent, turn.answer, turn.is_stopped) for turn in stored.tree.turns] == [
        (0, "A", True),
        (1, "B", True),
        (1, "B2", True),
        (3, "C", True),
        (0, "N", True),
    ]
    assert (stored.model, stored.tree.current_turn, stored.first_question) == ("m", 5, "anew")


def test_a_resumed_session_is_appended_to_its_log(
    logged_chat: Callable[..., tuple[ChatSession, Path]],
) -> None:
    chat, path = logged_chat(b"yes")
    handle_line(chat, "a?")
    chat.log.close()
    before = path.read_bytes()
    for tail in (b"", b'{"prompt": "half?", "parent": 1, "time": "now"', b'{"prompt": "tor'):
        path.write_bytes(before + tail)
        stored = session_log_reader.read_log(path)
        resumed_conversation = Conversation(default_sampling())
        stored.restore_into(resumed_conversation)
        log = SessionLog(config.load_config(), pytest.fail, path)
        assert log.resume(resumed_conversation)
        log.record_question({"prompt": "b?", "parent": 1, "time": "now"})
        resumed_conversation.add_turn("b?", "B", "stop")
        log.record_answer({"text": "B", "finish": "stop", "node": 2}, resumed_conversation)
        log.close()
        assert path.read_bytes().startswith(before + tail)
        reread = session_log_reader.read_log(path)
        assert (reread.tree, reread.n_damaged) == (
            resumed_conversation.tree,
            int(tail.endswith(b"tor")),
        )


def test_a_log_is_locked_while_a_chat_writes_it(
    logged_chat: Callable[..., tuple[ChatSession, Path]],
) -> None:
    chat, path = logged_chat(b"yes")
    handle_line(chat, "a?")
    assert is_in_use(path)
    assert not SessionLog(config.load_config(), pytest.fail, path).resume(chat.conversation)
    chat.log.close()
    assert not is_in_use(path)


KILLED_PROGRAM = """
import os, signal, sys
from pathlib import Path
from llmcli import config
from llmcli.chat.conversation.session_log import SessionLog
from llmcli.chat.input_loop import handle_line
from llmcli.chat.conversation.conversation import Conversation
from llmcli.chat.chat_session import ChatSession
from llmcli.chat.local_model import LocalModel
from llmcli.runtime.sampling import default_sampling
from llmcli.ui import UI
from tests.fixtures.fakes import fake_runner

conversation = Conversation(default_sampling().with_values({"temp": 0}))
runner = fake_runner(b"yes", n_ctx=4096, n_seq_max=4)
chat = ChatSession("fake", LocalModel(runner), conversation, config.load_config(), UI(color=False))
chat.log = SessionLog(chat.config, sys.exit)
asked = 0

def die(number):
    if asked == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)

chat.runner.context.before = die
for line in sys.argv[2:]:
    asked += not line.startswith("/") or line.startswith("/regen")
    handle_line(chat, line)
"""


@pytest.mark.parametrize(
    ("at", "turns", "lost"), [(1, 0, "one?"), (3, 2, "three?"), (4, 3, "three?")]
)
def test_a_killed_process_loses_only_the_current_answer(
    at: int, turns: int, lost: str, home: Path
) -> None:
    words = ["one?", "two?", "/undo", "/branch side", "three?", "/regen"]
    command = [sys.executable, "-c", KILLED_PROGRAM, str(at), *words]
    result = subprocess.run(
        command, capture_output=True, cwd=Path(__file__).parents[3], check=False
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    (path,) = (home / "state" / "sessions").glob("*.jsonl")
    stored = session_log_reader.read_log(path)
    assert [turn.question for turn in stored.tree.turns] == ["one?", "two?", "three?"][:turns]
    assert (stored.pending_message, stored.n_damaged) == (lost, 0)
    if at > 1:
        assert stored.tree.current_path() == [1]  # the turn before the unanswered question
        assert stored.tree.current_branch == "side"


def test_load_last_restores_the_conversation_of_a_log(
    logged_chat: Callable[..., tuple[ChatSession, Path]],
    make_chat: MakeChat,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chat, path = logged_chat(b"yes")
    for line in ("a?", "/regen", "b?", "/switch 1"):
        handle_line(chat, line)
    chat.log.close()
    with path.open("a") as file:
        file.write('{"prompt": "half?", "parent": 1, "time": "now"')
    second_chat = make_chat(b"yes")
    second_chat.name = "another"
    capsys.readouterr()
    run_command(second_chat, "/load last")
    output = capsys.readouterr()
    assert second_chat.conversation.tree == chat.conversation.tree
    assert output.out == (
        f"loaded {path.stem}: 1 turn, it was saved without a KV state;"
        f" {len(second_chat.conversation_tokens())} tokens are computed with the next message\n"
    )
    assert output.err == (
        "warning: that chat used fake; another continues it\n"
        "'half?' was not answered: /retry asks it again\n"
    )
    handle_line(second_chat, "/retry")
    assert [message.content for message in second_chat.conversation.messages] == [
        "a?",
        "yes",
        "half?",
        "yes",
    ]


def test_a_log_that_cannot_be_written_prints_one_warning(home: Path) -> None:
    (home / "state").write_text("a file where the folder should be")
    warnings: list[str] = []
    log = SessionLog(config.load_config(), warnings.append)
    for _ in range(2):
        log.record_question({"prompt": "a"})
        log.record_answer({"text": "b"}, Conversation(default_sampling()))
    assert len(warnings) == 1
    assert "not logged" in warnings[0]


def test_a_full_disk_leaves_no_partial_line() -> None:
    warnings: list[str] = []
    log = SessionLog(config.load_config(), warnings.append)
    log.record_question({"prompt": "whole"})
    log.record_answer({"text": "whole"}, Conversation(default_sampling()))
    before = log.path.read_bytes()
    with full_disk(len(before) + 10):
        log.record_question({"prompt": "x" * 100})
    assert log.path.read_bytes() == before
    assert len(warnings) == 1


def write_half_a_line(close_later: bool) -> SessionLog:
    """Return a log whose disk is full after a question. `close_later`: whether the disk has space
    again when the chat ends.
    """
    log = SessionLog(config.load_config(), lambda _: None)
    log.record_question({"prompt": "half?", "time": "now", "parent": 0})
    with full_disk(log.path.stat().st_size + 10):
        log.record_answer({"text": "x" * 100}, Conversation(default_sampling()))
        log.record_question({"prompt": "not logged"})
        if not close_later:
            log.close()
    if close_later:
        log.close()
    return log


@pytest.mark.parametrize("close_later", [True, False])
def test_half_a_line_is_ended_when_the_disk_has_space_again(close_later: bool) -> None:
    path = write_half_a_line(close_later).path
    assert path.read_bytes().endswith(b"\n") == close_later
    changed = path.stat().st_mtime_ns
    session_log.end_open_lines(config.load_config())
    assert records(path) == [{"prompt": "half?", "time": "now", "parent": 0, "event": "unanswered"}]
    if not close_later:  # the order of the sessions stays
        assert path.stat().st_mtime_ns == changed
    stored = session_log_reader.read_log(path)
    assert (stored.pending_message, stored.n_damaged) == ("half?", 0)


@pytest.mark.parametrize("tail", [b'{"prompt": "hal', b"\0\0\0", b'{"prompt": "a"'])
def test_every_log_but_a_running_one_ends_with_a_line(home: Path, tail: bytes) -> None:
    whole = b'{"prompt": "whole", "text": "yes"}\n'
    folder = home / "state" / "sessions"
    folder.mkdir(parents=True)
    ended, running, broken = (folder / f"{name}.jsonl" for name in ("ended", "running", "broken"))
    for path in (ended, running):
        path.write_bytes(whole + tail)
    broken.symlink_to(folder / "nowhere")
    with running.open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        session_log.end_open_lines(config.load_config())
    assert running.read_bytes() == whole + tail
    assert ended.read_bytes().startswith(whole + tail)
    assert ended.read_bytes().endswith(b"\n")
    session_log.end_open_lines(config.load_config())
    assert ended.read_bytes().count(b"\n") == 2


def test_a_log_on_a_disk_that_is_still_full_stays_as_it_is() -> None:
    path = write_half_a_line(False).path
    before = path.read_bytes()
    with full_disk(len(before) + 3):
        session_log.end_open_lines(config.load_config())
    assert path.read_bytes() == before
