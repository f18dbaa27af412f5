"""Reads a session log (session_log.py) and returns the conversation that it records.

If the last line has only its first half, it is a question without an answer. Damaged lines are
counted and skipped. Older logs, which contain the number of each turn instead of its parent, can
also be read.
"""

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmcli.chat.conversation import turn_records
from llmcli.chat.conversation.stored_conversation import StoredConversation
from llmcli.chat.conversation.tool_steps import parse_steps
from llmcli.chat.conversation.turn_tree import STOPPED, TurnTree

# The first half of a line, which is written before the answer. It ends with the field "time".
FIRST_HALF = re.compile(rb'\{"prompt": .*?(?<!\\)"time": "[^"\\]*"')


def read_log(path: Path) -> StoredConversation:
    """Return the conversation that the log at `path` records. Raises OSError if the file cannot be
    read.
    """
    conversation = StoredConversation(TurnTree())
    # The number in the tree of each turn number in the log. They differ after a damaged line.
    tree_numbers = {0: 0}
    for raw in turn_records.read_lines(path):
        if not raw.endswith(b"\n"):  # the last line, or one that is too long
            conversation.n_damaged += len(raw) == turn_records.MAX_LINE_BYTES
            _apply_first_half(conversation, tree_numbers, raw)
            continue
        record = _parse_object(raw)
        if record is None or not _apply_line(conversation, tree_numbers, record):
            conversation.n_damaged += 1
            _apply_first_half(conversation, tree_numbers, raw)
    return conversation


def _apply_first_half(stored: StoredConversation, numbers: dict[int, int], raw: bytes) -> None:
    """Apply an incomplete or damaged line: if its first half is readable, the question in it
    becomes the pending message. `numbers`: numbers in the tree by turn numbers of the log.
    """
    if (match := FIRST_HALF.match(raw)) and (record := _parse_object(match[0] + b"}")):
        with contextlib.suppress(turn_records.DamagedRecord):
            stored.read_constraint(record)
        _apply_question(stored, numbers, record)


def _apply_line(
    stored: StoredConversation, numbers: dict[int, int], record: Mapping[str, Any]
) -> bool:
    """Apply the record on one line to the conversation `stored`. Return False if the record is
    invalid. `numbers`: numbers in the tree by turn numbers of the log, which is updated.
    """
    try:
        stored.read_constraint(record)
    except turn_records.DamagedRecord:
        return False
    event = record.get("event")
    if event == "unanswered" or (event is None and "parent" in record and "node" not in record):
        return _apply_question(stored, numbers, record)
    stored.pending_message = None
    return (
        _apply_answer(stored, numbers, record)
        if event is None
        else _apply_event(stored, numbers, record)
    )


def _apply_answer(
    stored: StoredConversation, numbers: dict[int, int], record: Mapping[str, Any]
) -> bool:
    """Add the turn of a record with question and answer. Return False if the record is invalid."""
    question, answer = record.get("prompt"), record.get("answer", record.get("text"))
    if not isinstance(question, str) or not isinstance(answer, str):
        return False
    try:
        steps = parse_steps(record.get("tool_steps", []))
    except ValueError:
        return False
    tree = stored.tree
    tree.move_to(_parent(tree, numbers, record))
    timing = record.get("timing")
    n_tokens = timing.get("generated_tokens") if isinstance(timing, dict) else 0
    cut = record.get("finish") in STOPPED
    tokens = n_tokens if isinstance(n_tokens, int) else 0
    number = tree.add_turn(question, answer, is_stopped=cut, n_tokens=tokens, steps=steps)
    if isinstance(node := record.get("node"), int):
        numbers[node] = number
    if isinstance(dropped := record.get("left"), list):
        tree.dropped = {
            numbers[turn] for turn in dropped if isinstance(turn, int) and turn in numbers
        }
    _store_settings(stored, record)
    return True


def _parent(tree: TurnTree, numbers: Mapping[int, int], record: Mapping[str, Any]) -> int:
    """Return the number in the tree of the turn after which the record's question was asked. The
    record contains it as `parent`. Older logs contain instead, as `turn`, the position of the
    question in the conversation. If both are missing, it is the current turn.
    """
    if "parent" in record:
        parent = record["parent"]
        return (
            numbers.get(parent, tree.current_turn) if isinstance(parent, int) else tree.current_turn
        )
    path, turn = [0, *tree.current_path()], record.get("turn")
    return path[turn - 1] if isinstance(turn, int) and 0 < turn <= len(path) else tree.current_turn


def _apply_question(
    stored: StoredConversation, numbers: Mapping[int, int], record: Mapping[str, Any]
) -> bool:
    """Make the question of a record without an answer the pending message. Return False if the
    record is invalid.
    """
    if not isinstance(record.get("prompt"), str):
        return False
    stored.tree.move_to(_parent(stored.tree, numbers, record))
    stored.pending_message = record["prompt"]
    return True


def _apply_event(
    stored: StoredConversation, numbers: dict[int, int], record: Mapping[str, Any]
) -> bool:
    """Apply the record of an event. The event "tree" replaces the complete tree. The event "place"
    adds turns and changes the position in the tree. Return False if the record is invalid.
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
        # A turn is not a JSON object, or a key is missing.
        del tree.turns[count:]
        return False
    numbers.clear()
    numbers.update(new_numbers)
    if is_new_tree:
        stored.tree = tree
        _store_settings(stored, record)
    return True


def _store_settings(stored: StoredConversation, record: Mapping[str, Any]) -> None:
    """Copy the model and settings of a record to `stored`, without values of a wrong type."""
    model = record.get("model")
    if isinstance(model, dict) and isinstance(model.get("name"), str):
        stored.model = model["name"]
        server = model.get("server")
        stored.server = server if isinstance(server, str) else ""
    settings, system, predict, on_full = (
        record.get(key) for key in ("settings", "system", "predict", "on_full")
    )
    stored.settings = settings if isinstance(settings, dict) else {}
    stored.system = system if isinstance(system, str) else None
    stored.predict = predict if isinstance(predict, int) else None
    stored.on_full = on_full if isinstance(on_full, str) else ""


def _parse_object(raw: bytes) -> dict[str, Any] | None:
    """Return the JSON object in `raw`, or None if there is none."""
    try:
        return turn_records.parse_line(raw)
    except turn_records.DamagedRecord:
        return None
