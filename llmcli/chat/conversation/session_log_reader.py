"""Reads a session log back into a conversation.

A last line that ends after its first half is a question without an answer. Unreadable lines are
counted and skipped. Logs from before the tree format, which number their turns, are read as well.
"""

import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmcli.chat.conversation import turn_records
from llmcli.chat.conversation.stored_conversation import StoredConversation
from llmcli.chat.conversation.turn_tree import TurnTree

# the first half of a line, written before the answer; it ends with the time
FIRST_HALF = re.compile(rb'\{"prompt": .*?(?<!\\)"time": "[^"\\]*"')


def read_log(path: Path) -> StoredConversation:
    """Read the conversation of a log. Raises OSError if the file cannot be read."""
    conversation = StoredConversation(TurnTree())
    *lines, tail = path.read_bytes().split(b"\n")
    # turn numbers in the log -> in the tree; they differ after a damaged line
    tree_numbers = {0: 0}
    for raw in lines:
        record = _object(raw)
        if record is None or not _apply(conversation, tree_numbers, record):
            conversation.n_damaged += 1
            _half(conversation, tree_numbers, raw)
    if tail:
        _half(conversation, tree_numbers, tail)
    return conversation


def _half(stored: StoredConversation, numbers: dict[int, int], raw: bytes) -> None:
    """Read the question from the first half of an incomplete line."""
    if (half := FIRST_HALF.match(raw)) and (record := _object(half[0] + b"}")):
        with contextlib.suppress(turn_records.DamagedRecord):
            stored.read_constraint(record)
        _unanswered(stored, numbers, record)


def _apply(stored: StoredConversation, numbers: dict[int, int], record: Mapping[str, Any]) -> bool:
    """Apply one line to the conversation; return False if it is invalid."""
    try:
        stored.read_constraint(record)
    except turn_records.DamagedRecord:
        return False
    event = record.get("event")
    if event == "unanswered" or (event is None and "parent" in record and "node" not in record):
        return _unanswered(stored, numbers, record)
    stored.pending_message = None
    return _reply(stored, numbers, record) if event is None else _moved(stored, numbers, record)


def _reply(stored: StoredConversation, numbers: dict[int, int], record: Mapping[str, Any]) -> bool:
    """Add an answered question; return False if the record is invalid."""
    question, answer = record.get("prompt"), record.get("answer", record.get("text"))
    if not isinstance(question, str) or not isinstance(answer, str):
        return False
    tree = stored.tree
    tree.move_to(_parent(tree, numbers, record))
    timing = record.get("timing")
    n_tokens = timing.get("generated_tokens") if isinstance(timing, dict) else 0
    cut, tokens = record.get("finish") == "cancelled", n_tokens if isinstance(n_tokens, int) else 0
    number = tree.add_turn(question, answer, is_stopped=cut, n_tokens=tokens)
    if isinstance(node := record.get("node"), int):
        numbers[node] = number
    if isinstance(dropped := record.get("left"), list):
        tree.dropped = {
            numbers[turn] for turn in dropped if isinstance(turn, int) and turn in numbers
        }
    _settings(stored, record)
    return True


def _parent(tree: TurnTree, numbers: Mapping[int, int], record: Mapping[str, Any]) -> int:
    """Return the turn that a question follows.

    The record names it as `parent`. In older logs, `turn` is the question's number in the
    conversation. Without either, the question follows the current turn.
    """
    if "parent" in record:
        parent = record["parent"]
        return (
            numbers.get(parent, tree.current_turn) if isinstance(parent, int) else tree.current_turn
        )
    path, turn = [0, *tree.current_path()], record.get("turn")
    return path[turn - 1] if isinstance(turn, int) and 0 < turn <= len(path) else tree.current_turn


def _unanswered(
    stored: StoredConversation, numbers: Mapping[int, int], record: Mapping[str, Any]
) -> bool:
    """Record a question without an answer; return False if the record is invalid."""
    if not isinstance(record.get("prompt"), str):
        return False
    stored.tree.move_to(_parent(stored.tree, numbers, record))
    stored.pending_message = record["prompt"]
    return True


def _moved(stored: StoredConversation, numbers: dict[int, int], record: Mapping[str, Any]) -> bool:
    """Apply an event: `tree` replaces the tree, `place` adds turns and changes the position.

    Returns False if the record is invalid.
    """
    is_new_tree, turns, first = (
        record["event"] == "tree",
        record.get("turns"),
        record.get("first", 1),
    )
    if (
        record["event"] not in ("tree", "place")
        or not isinstance(turns, list)
        or not isinstance(first, int)
    ):
        return False
    tree = TurnTree() if is_new_tree else stored.tree
    new_numbers = {0: 0} if is_new_tree else dict(numbers)
    count, position = len(tree.turns), dict(record)
    try:
        for number, turn in enumerate(turns, first):
            turn_records.add_turn(tree, {**turn, "parent": new_numbers.get(turn["parent"], -1)})
            new_numbers[number] = len(tree.turns)
        position["at"] = new_numbers.get(record["at"], -1)
        position["names"] = {
            name: new_numbers.get(end, -1) for name, end in record["names"].items()
        }
        position["left"] = [new_numbers.get(number, -1) for number in record.get("left", [])]
        turn_records.restore_position(tree, position)
    except (turn_records.DamagedRecord, AttributeError, KeyError, TypeError):
        # an item is not an object, or a key is missing
        del tree.turns[count:]
        return False
    numbers.clear()
    numbers.update(new_numbers)
    if is_new_tree:
        stored.tree = tree
        _settings(stored, record)
    return True


def _settings(stored: StoredConversation, record: Mapping[str, Any]) -> None:
    """Store the settings of a record in `stored`; values of a wrong type are ignored."""
    model = record.get("model")
    if isinstance(model, dict) and isinstance(model.get("name"), str):
        stored.model = model["name"]
    settings, system, predict, on_full = (
        record.get(key) for key in ("settings", "system", "predict", "on_full")
    )
    stored.settings = settings if isinstance(settings, dict) else {}
    stored.system = system if isinstance(system, str) else None
    stored.predict = predict if isinstance(predict, int) else None
    stored.on_full = on_full if isinstance(on_full, str) else ""


def _object(raw: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(raw.decode("utf-8", "surrogatepass"))
    except (UnicodeDecodeError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
