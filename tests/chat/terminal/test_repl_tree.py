"""The tree of turns and its sessions at a real terminal, with the real model."""

import json
import signal
from pathlib import Path

import pytest

from llmcli.chat.conversation import session_log_reader
from tests.chat.terminal.test_repl import Terminal

pytestmark = pytest.mark.model


def test_edit_offers_the_old_question_and_a_killed_sitting_is_resumed(
    smollm2: Path, home: Path
) -> None:
    terminal = Terminal(smollm2)
    terminal.type("Hello")
    terminal.answer()
    terminal.type("/edit")
    terminal.child.expect("/edit 1 Hello")  # the next prompt holds it already
    terminal.child.send(" there\r")
    assert "reused" in terminal.answer()
    terminal.type("/tree")
    terminal.child.expect("1 of 2 turns on the path")
    terminal.type("Once more")
    terminal.child.expect("Once more")
    terminal.answer()
    terminal.type("/undo")
    terminal.child.expect("/switch 3 brings it back")
    terminal.type("/show")  # by now what /undo did is on the disk
    terminal.child.expect("turns")
    terminal.child.kill(signal.SIGKILL)
    terminal.child.wait()
    terminal.child.close(force=True)

    (path,) = (home / "state" / "sessions").glob("*.jsonl")
    held = session_log_reader.read_log(path)
    assert [turn.question for turn in held.tree.turns] == ["Hello", "Hello there", "Once more"]
    assert (held.tree.current_path(), held.n_damaged, held.pending_message) == ([2], 0, None)

    again = Terminal(smollm2, "chat", "--resume")
    again.child.expect(f"loaded {path.stem}: 1 turn, it was saved without a KV state")
    again.type("And again")
    again.answer()
    assert again.leave() == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert (lines[-1]["prompt"], lines[-1]["parent"], lines[-1]["node"]) == ("And again", 2, 4)


def test_a_saved_chat_is_resumed_without_prefill(smollm2: Path) -> None:
    terminal = Terminal(smollm2)
    terminal.type("Hello")
    terminal.answer()
    terminal.type("/save trip")
    terminal.child.expect("with the KV state of")
    assert terminal.leave() == 0
    again = Terminal(smollm2, "chat", "--resume", "trip")
    again.child.expect(r"loaded trip: 1 turn, (\d+) of (\d+) tokens in the cache")
    assert again.child.match
    cached, whole = map(int, again.child.match.groups())
    assert (
        cached >= whole - 16 - 3
    )  # the question at least; an answer may be spelled otherwise than it was said
    again.type("More")
    assert f"(+{cached} reused)" in again.answer()
    assert again.leave() == 0
