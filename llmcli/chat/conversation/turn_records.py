"""Turns, positions in a turn tree and constraints as JSON objects, checked when they are read.

Saved chats and session logs share these records.
"""

from collections.abc import Mapping
from typing import Any, get_args

from llmcli.chat.conversation.turn_tree import Turn, TurnTree
from llmcli.runtime.constraint.base import ENGINES, JUMP_MODES, Constraint, ConstraintKind


class DamagedRecord(ValueError):
    """The error for a record that is not a valid turn, position or constraint.

    The exception's text is the reason.
    """


def build_turn_record(turn: Turn) -> dict[str, Any]:
    """Convert a turn to a JSON object; `cut` is left out unless true."""
    record = {
        "parent": turn.parent,
        "question": turn.question,
        "answer": turn.answer,
        "tokens": turn.n_tokens,
    }
    return {**record, "cut": True} if turn.is_stopped else record


def build_position_record(tree: TurnTree) -> dict[str, Any]:
    """Convert the position in the tree to a JSON object: current turn, branches, dropped turns."""
    return {
        "at": tree.current_turn,
        "branch": tree.current_branch,
        "names": dict(tree.branch_ends),
        "left": sorted(tree.dropped),
    }


def build_constraint_record(constraint: Constraint | None) -> dict[str, str] | None:
    """Convert the constraint on answers to a JSON object."""
    if constraint is None:
        return None
    return {
        "kind": constraint.kind,
        "text": constraint.text,
        "engine": constraint.engine,
        "jump": constraint.jump,
    }


def parse_constraint(record: object) -> Constraint | None:
    """Parse the constraint on answers. Raises DamagedRecord.

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
        raise DamagedRecord("its format is not a schema or grammar")
    return Constraint(kind, text, engine, jump)


def add_turn(tree: TurnTree, record: Mapping[str, Any]) -> None:
    """Parse a turn and append it to the tree; the position stays. Raises DamagedRecord."""
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
    """Set the tree's position and branches. Raises DamagedRecord; then nothing has changed."""
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
