"""A sitting's log read again: the conversation as it was when the last whole line was written.

Half a last line is a question whose answer was not finished; other lines that cannot be read are
counted and left out. Logs of before there were trees, which number their turns, are read as well.
"""

import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmcli.chat.conversation import turn_records
from llmcli.chat.conversation.stored_conversation import Held
from llmcli.chat.conversation.turn_tree import Tree

# A line's first half, which is written before the answer: it ends with the time.
HALF = re.compile(rb'\{"prompt": .*?(?<!\\)"time": "[^"\\]*"')


def read(path: Path) -> Held:
    """The conversation of a log; OSError where the file cannot be read."""
    held = Held(Tree())
    *lines, tail = path.read_bytes().split(b"\n")
    numbers = {0: 0}  # of turns, in the log and in the tree: they differ behind a damaged line
    for raw in lines:
        record = _object(raw)
        if record is None or not _take(held, numbers, record):
            held.damaged += 1
            _half(held, numbers, raw)
    if tail:
        _half(held, numbers, tail)
    return held


def _half(held: Held, numbers: dict[int, int], raw: bytes) -> None:
    """A line that is not whole: the question may be."""
    if (half := HALF.match(raw)) and (record := _object(half[0] + b"}")):
        with contextlib.suppress(turn_records.Damaged):
            held.take_form(record)
        _unanswered(held, numbers, record)


def _take(held: Held, numbers: dict[int, int], record: Mapping[str, Any]) -> bool:
    """Do what one line says; False where it makes no sense."""
    try:
        held.take_form(record)
    except turn_records.Damaged:
        return False
    event = record.get("event")
    if event == "unanswered" or (event is None and "parent" in record and "node" not in record):
        return _unanswered(held, numbers, record)
    held.unanswered = None
    return _reply(held, numbers, record) if event is None else _moved(held, numbers, record)


def _reply(held: Held, numbers: dict[int, int], record: Mapping[str, Any]) -> bool:
    question, answer = record.get("prompt"), record.get("answer", record.get("text"))
    if not isinstance(question, str) or not isinstance(answer, str):
        return False
    tree = held.tree
    tree.move(_parent(tree, numbers, record))
    timing = record.get("timing")
    counted = timing.get("generated_tokens") if isinstance(timing, dict) else 0
    cut, tokens = record.get("finish") == "cancelled", counted if isinstance(counted, int) else 0
    number = tree.add(question, answer, cut=cut, tokens=tokens)
    if isinstance(node := record.get("node"), int):
        numbers[node] = number
    if isinstance(left := record.get("left"), list):
        tree.left = {numbers[turn] for turn in left if isinstance(turn, int) and turn in numbers}
    _settings(held, record)
    return True


def _parent(tree: Tree, numbers: Mapping[int, int], record: Mapping[str, Any]) -> int:
    """The turn that a question follows: the one it names, or by its place in the conversation, or
    the last.
    """
    if "parent" in record:
        parent = record["parent"]
        return numbers.get(parent, tree.at) if isinstance(parent, int) else tree.at
    path, turn = [0, *tree.path()], record.get("turn")
    return path[turn - 1] if isinstance(turn, int) and 0 < turn <= len(path) else tree.at


def _unanswered(held: Held, numbers: Mapping[int, int], record: Mapping[str, Any]) -> bool:
    if not isinstance(record.get("prompt"), str):
        return False
    held.tree.move(_parent(held.tree, numbers, record))
    held.unanswered = record["prompt"]
    return True


def _moved(held: Held, numbers: dict[int, int], record: Mapping[str, Any]) -> bool:
    """A tree in place of this one, or more turns and another place in it."""
    anew, turns, first = record["event"] == "tree", record.get("turns"), record.get("first", 1)
    if (
        record["event"] not in ("tree", "place")
        or not isinstance(turns, list)
        or not isinstance(first, int)
    ):
        return False
    tree = Tree() if anew else held.tree
    known = {0: 0} if anew else dict(numbers)
    count, place = len(tree.turns), dict(record)
    try:
        for number, turn in enumerate(turns, first):
            turn_records.add_turn(tree, {**turn, "parent": known.get(turn["parent"], -1)})
            known[number] = len(tree.turns)
        place["at"] = known.get(record["at"], -1)
        place["names"] = {name: known.get(end, -1) for name, end in record["names"].items()}
        place["left"] = [known.get(number, -1) for number in record.get("left", [])]
        turn_records.put_place(tree, place)
    except (
        turn_records.Damaged,
        AttributeError,
        KeyError,
        TypeError,
    ):  # the others: what is no object, or not there
        del tree.turns[count:]
        return False
    numbers.clear()
    numbers.update(known)
    if anew:
        held.tree = tree
        _settings(held, record)
    return True


def _settings(held: Held, record: Mapping[str, Any]) -> None:
    """What the next answer depended on then; of a wrong type it is as if it had not been told."""
    model = record.get("model")
    if isinstance(model, dict) and isinstance(model.get("name"), str):
        held.model = model["name"]
    settings, system, predict, on_full = (
        record.get(key) for key in ("settings", "system", "predict", "on_full")
    )
    held.settings = settings if isinstance(settings, dict) else {}
    held.system = system if isinstance(system, str) else None
    held.predict = predict if isinstance(predict, int) else None
    held.on_full = on_full if isinstance(on_full, str) else ""


def _object(raw: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(raw.decode("utf-8", "surrogatepass"))
    except (UnicodeDecodeError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
