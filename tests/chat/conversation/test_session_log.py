"""The session log contains the whole conversation, even if its process was killed."""

import json
import random
import resource
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
from llmcli.chat.conversation import session_log_reader
from llmcli.chat.conversation.conversation import Conversation
from llmcli.chat.conversation.session_log import SessionLog, is_in_use
from llmcli.chat.conversation.turn_tree import TurnTree
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.chat.input_loop import handle_line
from llmcli.errors import UserError
from llmcli.runtime.sampling import default_sampling
from llmcli.types import Event

Make = Callable[..., ChatSession]


@pytest.fixture
def logged(talk: Make) -> Callable[..., tuple[ChatSession, Path]]:
    """Make a talk that is recorded, and the file of its log."""

    def make(*reply: Any, **more: Any) -> tuple[ChatSession, Path]:
        one = talk(*reply, **more)
        log = one.log = SessionLog(one.config, pytest.fail)
        return one, log.path

    return make


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_reply_is_one_line_with_what_led_to_it(
    logged: Callable[..., tuple[ChatSession, Path]],
) -> None:
    one, path = logged(b"yes")
    one.ask("a?", StreamWriter(silent=True))
    one.ask("b?", StreamWriter(silent=True))
    told = [(line["turn"], line["prompt"], line["text"]) for line in lines(path)]
    assert told == [(1, "a?", "yes"), (2, "b?", "yes")]
    for line in lines(path):
        assert {"model", "text", "finish", "tokens", "timing", "kv", "seed"} <= set(line)
    assert lines(path)[0]["settings"]["temp"] == 0
    assert path.stat().st_mode & 0o077 == 0


def test_the_question_is_on_the_disk_before_the_answer(
    logged: Callable[..., tuple[ChatSession, Path]],
) -> None:
    one, path = logged(b"yes")
    seen: list[session_log_reader.StoredConversation] = []
    one.runner.context.before = lambda number: seen.append(session_log_reader.read_log(path))  # type: ignore[attr-defined]
    one.ask('the "time": "x" {question}\n', StreamWriter(silent=True))
    assert seen
    for held in seen:
        assert (held.pending_message, held.tree.turns, held.n_damaged) == (
            'the "time": "x" {question}\n',
            [],
            0,
        )
    assert session_log_reader.read_log(path).tree == one.conversation.tree


def test_an_answer_that_an_error_ended_is_an_unanswered_question(
    logged: Callable[..., tuple[ChatSession, Path]],
) -> None:
    class Broken(StreamWriter):
        def write_event(self, event: Event) -> None:
            raise UserError("cannot write the output")

    one, path = logged(b"yes")
    with pytest.raises(UserError):
        one.ask("a?", Broken())
    assert lines(path)[0]["event"] == "unanswered"
    assert session_log_reader.read_log(path).pending_message == "a?"
    one.ask("b?", StreamWriter(silent=True))
    held = session_log_reader.read_log(path)
    assert (held.pending_message, held.tree) == (None, one.conversation.tree)


@pytest.mark.parametrize("seed", range(25))
def test_any_mix_of_commands_is_read_as_it_was(
    seed: int, logged: Callable[..., tuple[ChatSession, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(seed)
    one, path = logged(b"ja", n_ctx=2048, n_seq_max=4)
    for step in range(30):
        turns = len(one.conversation.tree.turns)
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
            handle_line(one, line)
        except UserError:
            continue
        held = (
            session_log_reader.read_log(path)
            if path.exists()
            else session_log_reader.StoredConversation(TurnTree())
        )
        assert (held.tree, held.n_damaged, held.pending_message) == (
            one.conversation.tree,
            0,
            None,
        ), line
        assert held.model == ("fake" if held.tree.turns else held.model)
        one.runner.engine.ledger.check()
    if path.exists():
        again = Conversation(default_sampling())
        session_log_reader.read_log(path).restore_into(again)
        assert again.messages == one.conversation.messages
        assert all(("event" in line) != ("text" in line) for line in lines(path))


def test_turns_that_left_the_context_are_known_again(
    logged: Callable[..., tuple[ChatSession, Path]],
) -> None:
    one, path = logged(b"0123456789 and some more words", n_ctx=128, n_seq_max=4)
    handle_line(one, "/set on_full shift")
    for number in range(6):
        handle_line(one, f"question {number}?")
    handle_line(one, "/switch 5")
    held = session_log_reader.read_log(path)
    assert one.conversation.tree.dropped
    assert (held.tree, held.on_full, held.n_damaged) == (one.conversation.tree, "shift", 0)
    handle_line(one, "/save a")
    handle_line(one, "/load a")
    assert session_log_reader.read_log(path).tree == one.conversation.tree == held.tree
    assert one.conversation.on_full == "shift"


def test_the_form_of_answers_is_told_once_and_known_again(
    logged: Callable[..., tuple[ChatSession, Path]],
) -> None:
    one, path = logged(b"yes", n_seq_max=2)
    form, grammar = '/set format {"enum": ["ja"]}', '/set grammar root ::= "o"'
    for line in (form, "a?", "b?", "/set format none", "c?", grammar, "d?"):
        handle_line(one, line)
    assert ["format" in line for line in lines(path)] == [True, False, True, True]
    held = session_log_reader.read_log(path)
    assert (held.constraint, held.has_constraint) == (one.conversation.constraint, True)
    text = path.read_text().splitlines()
    path.write_text(
        "\n".join(text[:2]) + "\n" + text[2].partition('"model"')[0]
    )  # killed within the third answer
    held = session_log_reader.read_log(path)
    assert (held.constraint, held.has_constraint, held.pending_message) == (None, True, "c?")


def test_a_log_that_was_cut_anywhere_gives_all_that_was_whole(
    logged: Callable[..., tuple[ChatSession, Path]],
) -> None:
    one, path = logged(b"yes")
    for text in ("a?", "ü?", "c?"):
        handle_line(one, text)
    handle_line(one, "/undo")
    whole = path.read_bytes()
    rows = whole.splitlines(keepends=True)
    ends = [sum(map(len, rows[:count])) for count in range(len(rows) + 1)]
    for cut in range(0, len(whole), 7):
        path.write_bytes(whole[:cut])
        held = session_log_reader.read_log(path)
        count = sum(end <= cut for end in ends) - 1
        assert len(held.tree.turns) == min(count, 3)
        assert held.n_damaged == 0
        if held.pending_message:
            assert held.pending_message == ("a?", "ü?", "c?")[count]


def test_damaged_lines_are_left_out_and_counted(
    logged: Callable[..., tuple[ChatSession, Path]],
) -> None:
    one, path = logged(b"yes")
    for text in ("a?", "b?", "c?", "/switch 1", "d?", "/branch x", "/undo"):
        handle_line(one, text)
    raw = path.read_bytes().splitlines()
    raw[1] = raw[1][:-40]
    raw += [b'{"event": "tree", "turns": [3]}', b'{"event": 7}', b""]
    path.write_bytes(b"\n".join([b"{}", b"\xff", b"[1]", *raw]))
    held = session_log_reader.read_log(path)
    assert held.n_damaged == 6
    assert [turn.question for turn in held.tree.turns] == ["a?", "c?", "d?"]
    assert [turn.parent for turn in held.tree.turns] == [
        0,
        1,
        1,
    ]  # c? goes on from the last turn before it
    assert (held.tree.current_turn, held.tree.current_branch, held.pending_message) == (
        1,
        "x",
        None,
    )


def test_logs_of_before_there_were_trees_are_read(home: Path) -> None:
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
    held = session_log_reader.read_log(path)
    assert [(turn.parent, turn.answer, turn.is_stopped) for turn in held.tree.turns] == [
        (0, "A", True),
        (1, "B", True),
        (1, "B2", True),
        (3, "C", True),
        (0, "N", True),
    ]
    assert (held.model, held.tree.current_turn, held.first_question) == ("m", 5, "anew")


def test_a_sitting_goes_on_in_its_own_log_which_is_never_rewritten(
    logged: Callable[..., tuple[ChatSession, Path]],
) -> None:
    one, path = logged(b"yes")
    handle_line(one, "a?")
    one.log.close()
    before = path.read_bytes()
    for tail in (b"", b'{"prompt": "half?", "parent": 1, "time": "now"', b'{"prompt": "tor'):
        path.write_bytes(before + tail)
        held = session_log_reader.read_log(path)
        again = Conversation(default_sampling())
        held.restore_into(again)
        log = SessionLog(config.load_config(), pytest.fail, path)
        assert log.resume(again)
        log.record_question({"prompt": "b?", "parent": 1, "time": "now"})
        again.add_turn("b?", "B", "stop")
        log.record_answer({"text": "B", "finish": "stop", "node": 2}, again)
        log.close()
        assert path.read_bytes().startswith(before + tail)
        read = session_log_reader.read_log(path)
        assert (read.tree, read.n_damaged) == (again.tree, int(tail.endswith(b"tor")))


def test_two_chats_do_not_write_one_log(logged: Callable[..., tuple[ChatSession, Path]]) -> None:
    one, path = logged(b"yes")
    handle_line(one, "a?")
    assert is_in_use(path)
    assert not SessionLog(config.load_config(), pytest.fail, path).resume(one.conversation)
    one.log.close()
    assert not is_in_use(path)


KILLED = """
import os, signal, sys
from pathlib import Path
from llmcli import config
from llmcli.chat.conversation.session_log import SessionLog
from llmcli.chat.input_loop import handle_line
from llmcli.chat.conversation.conversation import Conversation
from llmcli.chat.chat_session import ChatSession
from llmcli.runtime.sampling import default_sampling
from llmcli.ui import UI
from tests.fixtures.fakes import fake_runner

conversation = Conversation(default_sampling().with_values({"temp": 0}))
runner = fake_runner(b"yes", n_ctx=4096, n_seq_max=4)
chat = ChatSession("fake", runner, conversation, config.load_config(), UI(color=False))
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
def test_kill_9_in_an_answer_loses_that_answer_alone(
    at: int, turns: int, lost: str, home: Path
) -> None:
    words = ["one?", "two?", "/undo", "/branch side", "three?", "/regen"]
    command = [sys.executable, "-c", KILLED, str(at), *words]
    done = subprocess.run(command, capture_output=True, cwd=Path(__file__).parents[3], check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (path,) = (home / "state" / "sessions").glob("*.jsonl")
    held = session_log_reader.read_log(path)
    assert [turn.question for turn in held.tree.turns] == ["one?", "two?", "three?"][:turns]
    assert (held.pending_message, held.n_damaged) == (lost, 0)
    if at > 1:
        assert held.tree.current_path() == [1]  # where the question belongs
        assert held.tree.current_branch == "side"


def test_what_resume_takes_up_is_what_was_there(
    logged: Callable[..., tuple[ChatSession, Path]], talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one, path = logged(b"yes")
    for line in ("a?", "/regen", "b?", "/switch 1"):
        handle_line(one, line)
    one.log.close()
    with path.open("a") as file:
        file.write('{"prompt": "half?", "parent": 1, "time": "now"')
    other = talk(b"yes")
    other.name = "another"
    capsys.readouterr()
    run_command(other, "/load last")
    told = capsys.readouterr()
    assert other.conversation.tree == one.conversation.tree
    assert told.out == (
        f"loaded {path.stem}: 1 turn, it was saved without a KV state;"
        f" {len(other.conversation_tokens())} tokens are computed with the next message\n"
    )
    assert told.err == (
        "warning: that chat used fake; another continues it\n"
        "'half?' was not answered: /retry asks it again\n"
    )
    handle_line(other, "/retry")
    assert [message.content for message in other.conversation.messages] == [
        "a?",
        "yes",
        "half?",
        "yes",
    ]


def test_a_disk_that_takes_no_log_is_told_once(home: Path) -> None:
    (home / "state").write_text("a file where the folder should be")
    told: list[str] = []
    log = SessionLog(config.load_config(), told.append)
    for _ in range(2):
        log.record_question({"prompt": "a"})
        log.record_answer({"text": "b"}, Conversation(default_sampling()))
    assert len(told) == 1
    assert "not logged" in told[0]


def test_a_disk_that_fills_up_leaves_no_half_word() -> None:
    told: list[str] = []
    log = SessionLog(config.load_config(), told.append)
    log.record_question({"prompt": "whole"})
    log.record_answer({"text": "whole"}, Conversation(default_sampling()))
    before = log.path.read_bytes()
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The kernel lets a file grow this far and no further, as a full disk does.
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, old[1]))
    try:
        log.record_question({"prompt": "x" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert log.path.read_bytes() == before
    assert len(told) == 1
