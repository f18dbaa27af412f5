"""/edit, resumed sessions and saved chats in a pseudo-terminal, with a real model."""

import json
import signal
from pathlib import Path

import pytest

from llmcli.chat.conversation import session_log_reader
from tests.chat.terminal.test_repl import Terminal

pytestmark = pytest.mark.model


def test_edit_offers_the_old_question_and_a_killed_session_is_resumed(
    smollm2: Path, home: Path
) -> None:
    terminal = Terminal(smollm2)
    terminal.type("Hello")
    terminal.answer()
    terminal.type("/edit")
    terminal.child.expect("/edit 1 Hello")  # the text of the next input line
    terminal.child.send(" there\r")
    assert "reused" in terminal.answer()
    terminal.type("/tree")
    terminal.child.expect("1 of 2 turns on the path")
    terminal.type("Once more")
    terminal.child.expect("Once more")
    terminal.answer()
    terminal.type("/undo")
    terminal.child.expect("/switch 3 brings it back")
    terminal.type("/show")  # after this, the log contains the /undo
    terminal.child.expect("turns")
    terminal.child.kill(signal.SIGKILL)
    terminal.child.wait()
    terminal.child.close(force=True)

    (path,) = (home / "state" / "sessions").glob("*.jsonl")
    stored = session_log_reader.read_log(path)
    assert [turn.question for turn in stored.tree.turns] == ["Hello", "Hello there", "Once more"]
    assert (stored.tree.current_path(), stored.n_damaged, stored.pending_message) == ([2], 0, None)

    resumed = Terminal(smollm2, "chat", "--resume")
    resumed.child.expect(f"loaded {path.stem}: 1 turn, it was saved without a KV state")
    resumed.type("And again")
    resumed.answer()
    assert resumed.leave() == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert (lines[-1]["prompt"], lines[-1]["parent"], lines[-1]["node"]) == ("And again", 2, 4)


def test_a_saved_chat_is_resumed_without_prefill(smollm2: Path) -> None:
    terminal = Terminal(smollm2)
    terminal.type("Hello")
    terminal.answer()
    terminal.type("/save trip")
    terminal.child.expect("with the KV state of")
    assert terminal.leave() == 0
    resumed = Terminal(smollm2, "chat", "--resume", "trip")
    resumed.child.expect(r"loaded trip: 1 turn, (\d+) of (\d+) tokens in the cache")
    assert resumed.child.match
    cached, n_tokens = map(int, resumed.child.match.groups())
    assert (
        cached >= n_tokens - 16 - 3
    )  # the question at least; an answer may be spelled otherwise than it was said
    resumed.type("More")
    assert f"(+{cached} reused)" in resumed.answer()
    assert resumed.leave() == 0
