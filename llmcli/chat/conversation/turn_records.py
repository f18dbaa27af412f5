"""Turns, positions in a turn tree and constraints as JSON objects, checked when they are read.

Saved chats and session logs share these records.
"""

from collections.abc import Mapping
from typing import Any, get_args

from llmcli.chat.conversation.turn_tree import Tree, Turn
from llmcli.runtime.constraint.base import ENGINES, JUMP_MODES, Constraint, ConstraintKind


class Damaged(ValueError):
    """An object that is not a valid turn, position or constraint. The text is the reason."""


def turn_record(turn: Turn) -> dict[str, Any]:
    """Convert a turn to a JSON object; `cut` is left out unless true."""
    record = {
        "parent": turn.parent,
        "question": turn.question,
        "answer": turn.answer,
        "tokens": turn.tokens,
    }
    return {**record, "cut": True} if turn.cut else record


def place_record(tree: Tree) -> dict[str, Any]:
    """Convert the position in the tree to a JSON object: current turn, branches, dropped turns."""
    return {
        "at": tree.at,
        "branch": tree.branch,
        "names": dict(tree.names),
        "left": sorted(tree.left),
    }


def form_record(asked: Constraint | None) -> dict[str, str] | None:
    """Convert the constraint on answers to a JSON object."""
    if asked is None:
        return None
    return {"kind": asked.kind, "text": asked.text, "engine": asked.engine, "jump": asked.jump}


def form(record: object) -> Constraint | None:
    """Parse the constraint on answers. Raises Damaged.

    Whether a model can follow it is not checked.
    """
    if record is None:
        return None
    table: dict[str, Any] = record if isinstance(record, dict) else {}
    kind: Any = table.get("kind")
    text, engine, jump = (table.get(key) for key in ("text", "engine", "jump"))
    if (
        kind not in get_args(ConstraintKind)
        or engine not in ENGINES
        or jump not in JUMP_MODES
        or not isinstance(text, str)
    ):
        raise Damaged("its format is not a schema or grammar")
    return Constraint(kind, text, engine, jump)


def add_turn(tree: Tree, record: Mapping[str, Any]) -> None:
    """Append a parsed turn to the tree without changing the position. Raises Damaged."""
    parent, tokens = record.get("parent"), record.get("tokens", 0)
    if not isinstance(parent, int) or not 0 <= parent <= len(tree.turns):
        raise Damaged("its parent is not an earlier turn")
    if not isinstance(record.get("question"), str) or not isinstance(record.get("answer"), str):
        raise Damaged("question and answer must be text")
    n_tokens = tokens if isinstance(tokens, int) and tokens > 0 else 0
    tree.turns.append(
        Turn(parent, record["question"], record["answer"], record.get("cut") is True, n_tokens)
    )


def put_place(tree: Tree, record: Mapping[str, Any]) -> None:
    """Set the tree's position and branches. Raises Damaged; then nothing has changed."""
    at, branch, names, dropped = (record.get(key) for key in ("at", "branch", "names", "left"))
    dropped = [] if dropped is None else dropped
    if not isinstance(names, dict) or not isinstance(dropped, list):
        raise Damaged("it does not contain the position in the conversation")
    for end in (at, *names.values(), *dropped):
        if not isinstance(end, int) or not 0 <= end <= len(tree.turns):
            raise Damaged("it refers to a missing turn")
    if not isinstance(branch, str) or (branch and names.get(branch) != at):
        raise Damaged("its branch does not end at the current turn")
    assert isinstance(at, int)  # checked with the other ends
    tree.at, tree.branch, tree.names, tree.left = at, branch, dict(names), set(dropped)
