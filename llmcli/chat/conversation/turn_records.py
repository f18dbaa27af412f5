"""Converts turns, the position in a turn tree and constraints to JSON objects, and back. Objects
that are read are checked. Saved chats and session logs consist of these objects.
"""

from collections.abc import Mapping
from typing import Any, get_args

from llmcli.chat.conversation.turn_tree import Turn, TurnTree
from llmcli.runtime.constraint.base import ENGINES, JUMP_MODES, Constraint, ConstraintKind


class DamagedRecord(ValueError):
    """Raised if a JSON object is not a valid turn, position or constraint. Its text says why."""


def build_turn_record(turn: Turn) -> dict[str, Any]:
    """Convert a turn to a JSON object. The field `cut` is present only if the user interrupted the
    answer.
    """
    record = {
        "parent": turn.parent,
        "question": turn.question,
        "answer": turn.answer,
        "tokens": turn.n_tokens,
    }
    return {**record, "cut": True} if turn.is_stopped else record


def build_position_record(tree: TurnTree) -> dict[str, Any]:
    """Convert the current turn (`at`), the current branch, the last turns of all branches (`names`)
    and the dropped turns (`left`) to a JSON object.
    """
    return {
        "at": tree.current_turn,
        "branch": tree.current_branch,
        "names": dict(tree.branch_ends),
        "left": sorted(tree.dropped),
    }


def build_constraint_record(constraint: Constraint | None) -> dict[str, str] | None:
    """Convert the grammar or schema for answers to a JSON object, or None to None."""
    if constraint is None:
        return None
    return {
        "kind": constraint.kind,
        "text": constraint.text,
        "engine": constraint.engine,
        "jump": constraint.jump,
    }


def parse_constraint(record: object) -> Constraint | None:
    """Convert a JSON object to a constraint, or None to None. Raises DamagedRecord if the object
    has wrong fields. The grammar or schema in it is not checked.
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
        raise DamagedRecord("its format is not a schema or grammar")
    return Constraint(kind, text, engine, jump)


def add_turn(tree: TurnTree, record: Mapping[str, Any]) -> None:
    """Append the turn of a JSON object to the tree, without making it the current turn. Raises
    DamagedRecord if the object is invalid.
    """
    parent, tokens = record.get("parent"), record.get("tokens", 0)
    if not isinstance(parent, int) or not 0 <= parent <= len(tree.turns):
        raise DamagedRecord("its parent is not an earlier turn")
    if not isinstance(record.get("question"), str) or not isinstance(record.get("answer"), str):
        raise DamagedRecord("question and answer must be text")
    n_tokens = tokens if isinstance(tokens, int) and tokens > 0 else 0
    tree.turns.append(
        Turn(parent, record["question"], record["answer"], record.get("cut") is True, n_tokens)
    )


def restore_position(tree: TurnTree, record: Mapping[str, Any]) -> None:
    """Set the current turn, the branches and the dropped turns of the tree to those of a JSON
    object. Raises DamagedRecord if the object is invalid. The tree is then unchanged.
    """
    at, branch, names, dropped = (record.get(key) for key in ("at", "branch", "names", "left"))
    dropped = [] if dropped is None else dropped
    if not isinstance(names, dict) or not isinstance(dropped, list):
        raise DamagedRecord("it does not contain the position in the conversation")
    for end in (at, *names.values(), *dropped):
        if not isinstance(end, int) or not 0 <= end <= len(tree.turns):
            raise DamagedRecord("it refers to a missing turn")
    if not isinstance(branch, str) or (branch and names.get(branch) != at):
        raise DamagedRecord("its branch does not end at the current turn")
    assert isinstance(at, int)  # the loop above has checked it
    tree.current_turn, tree.current_branch, tree.branch_ends, tree.dropped = (
        at,
        branch,
        dict(names),
        set(dropped),
    )
