"""Turns and places of a tree, and the form of answers, as JSON objects, and back.

What is read was written by anybody: all of it is checked.
Saved chats and session logs share it; it knows no files.
"""

from collections.abc import Mapping
from typing import Any, get_args

from llmcli.chat.conversation.turn_tree import Tree, Turn
from llmcli.runtime.constraint.base import ENGINES, JUMPS, Constraint, Kind


class Damaged(ValueError):
    """An object that is no turn, no place or no form; the reason is its text."""


def turn_record(turn: Turn) -> dict[str, Any]:
    """A turn; what is usual is left out."""
    record = {
        "parent": turn.parent,
        "question": turn.question,
        "answer": turn.answer,
        "tokens": turn.tokens,
    }
    return {**record, "cut": True} if turn.cut else record


def place_record(tree: Tree) -> dict[str, Any]:
    """Where the conversation is, the ends of its branches, and the turns that have left the
    context.
    """
    return {
        "at": tree.at,
        "branch": tree.branch,
        "names": dict(tree.names),
        "left": sorted(tree.left),
    }


def form_record(asked: Constraint | None) -> dict[str, str] | None:
    """What every answer must be."""
    if asked is None:
        return None
    return {"kind": asked.kind, "text": asked.text, "engine": asked.engine, "jump": asked.jump}


def form(record: object) -> Constraint | None:
    """What every answer must be; whether a model can follow it is another question. Raises Damaged."""
    if record is None:
        return None
    table: dict[str, Any] = record if isinstance(record, dict) else {}
    kind: Any = table.get("kind")
    text, engine, jump = (table.get(key) for key in ("text", "engine", "jump"))
    if (
        kind not in get_args(Kind)
        or engine not in ENGINES
        or jump not in JUMPS
        or not isinstance(text, str)
    ):
        raise Damaged("its format is no schema or grammar")
    return Constraint(kind, text, engine, jump)


def add_turn(tree: Tree, record: Mapping[str, Any]) -> None:
    """Put a turn that was read into the tree; where the conversation is stays. Raises Damaged."""
    parent, tokens = record.get("parent"), record.get("tokens", 0)
    if not isinstance(parent, int) or not 0 <= parent <= len(tree.turns):
        raise Damaged("its parent is no turn before it")
    if not isinstance(record.get("question"), str) or not isinstance(record.get("answer"), str):
        raise Damaged("question and answer must be text")
    counted = tokens if isinstance(tokens, int) and tokens > 0 else 0
    tree.turns.append(
        Turn(parent, record["question"], record["answer"], record.get("cut") is True, counted)
    )


def put_place(tree: Tree, record: Mapping[str, Any]) -> None:
    """Go where the record says, with its branches. Raises Damaged, and then nothing has changed."""
    at, branch, names, left = (record.get(key) for key in ("at", "branch", "names", "left"))
    left = [] if left is None else left
    if not isinstance(names, dict) or not isinstance(left, list):
        raise Damaged("it does not tell where the conversation is")
    for end in (at, *names.values(), *left):
        if not isinstance(end, int) or not 0 <= end <= len(tree.turns):
            raise Damaged("it leads to a turn that is not there")
    if not isinstance(branch, str) or (branch and names.get(branch) != at):
        raise Damaged("its branch does not end where the conversation is")
    assert isinstance(at, int)  # as all ends are
    tree.at, tree.branch, tree.names, tree.left = at, branch, dict(names), set(left)
