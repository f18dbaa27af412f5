"""Converts turns, the position in a turn tree and constraints to JSON objects, and back. Objects
that are read are checked. Saved chats and session logs consist of these objects, one on each line.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from llmcli.chat.conversation.tool_steps import ToolStep, build_step_records
from llmcli.chat.conversation.turn_tree import Turn, TurnTree
from llmcli.runtime.constraint.base import ENGINES, JUMP_MODES, Constraint, ConstraintKind
from quant.json_dataclasses import decode_value, json_key, parse_object

MAX_LINE_BYTES = 1 << 25  # maximum length of a line; a line may contain all turns of a long chat


class DamagedRecord(ValueError):
    """Raised if a line is no JSON object, or if the object is not a valid turn, position or
    constraint. Its text says why.
    """


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """The JSON object of a turn. `cut`: the answer was stopped. `tool_steps`: the calls of
    tools before it.
    """

    parent: int
    question: str
    answer: str
    tokens: int = 0
    cut: bool = False
    tool_steps: tuple[ToolStep, ...] = ()


@dataclass(frozen=True, slots=True)
class PositionRecord:
    """The JSON object of the position in a turn tree: the current turn (`at`), the current branch,
    the last turns of all branches (`names`), and the dropped turns.
    """

    at: int
    branch: str
    names: Mapping[str, int]
    dropped: tuple[int, ...] | None = field(default=None, metadata=json_key("left"))


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file with their line ends. The last line may have none. Of a line of
    more than MAX_LINE_BYTES, only the first MAX_LINE_BYTES are yielded. Raises OSError.
    """
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES):
            yield line
            end = line
            while len(end) == MAX_LINE_BYTES and not end.endswith(b"\n"):
                end = file.readline(MAX_LINE_BYTES)


def parse_line(raw: bytes) -> dict[str, Any]:
    """Return the JSON object on a line. Bytes that are not UTF-8 become U+FFFD. Raises
    DamagedRecord.
    """
    try:
        return parse_object(raw, MAX_LINE_BYTES, decode_errors="replace")
    except ValueError as error:
        raise DamagedRecord(str(error)) from None


def build_turn_record(turn: Turn) -> dict[str, Any]:
    """Convert a turn to a JSON object. The field `cut` is present only if the answer was stopped,
    and `tool_steps` only if tools were called.
    """
    record: dict[str, Any] = {
        "parent": turn.parent,
        "question": turn.question,
        "answer": turn.answer,
        "tokens": turn.n_tokens,
    }
    if turn.steps:
        record["tool_steps"] = build_step_records(turn.steps)
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


def build_constraint_record(constraint: Constraint | None) -> dict[str, Any] | None:
    """Convert the grammar or schema for answers to a JSON object, or None to None."""
    if constraint is None:
        return None
    return {
        "kind": constraint.kind,
        "text": constraint.text,
        "engine": constraint.engine,
        "jump": constraint.jump,
        **({"strict": True} if constraint.is_strict else {}),
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
    return Constraint(kind, text, engine, jump, table.get("strict") is True)


def add_turn(tree: TurnTree, record: Mapping[str, Any]) -> None:
    """Append the turn of a JSON object to the tree, without making it the current turn. Raises
    DamagedRecord if the object is invalid.
    """
    turn: TurnRecord = _decode(TurnRecord, record, "it is not a turn")
    if not 0 <= turn.parent <= len(tree.turns):
        raise DamagedRecord("its parent is not an earlier turn")
    n_tokens = max(0, turn.tokens)
    tree.turns.append(
        Turn(turn.parent, turn.question, turn.answer, turn.cut, n_tokens, turn.tool_steps)
    )


def restore_position(tree: TurnTree, record: Mapping[str, Any]) -> None:
    """Set the current turn, the branches and the dropped turns of the tree to those of a JSON
    object. Raises DamagedRecord if the object is invalid. The tree is then unchanged.
    """
    position: PositionRecord = _decode(PositionRecord, record, "it does not contain the position")
    names, dropped = position.names, position.dropped or ()
    if not all(0 <= end <= len(tree.turns) for end in (position.at, *names.values(), *dropped)):
        raise DamagedRecord("it refers to a missing turn")
    if position.branch and names.get(position.branch) != position.at:
        raise DamagedRecord("its branch does not end at the current turn")
    tree.current_turn, tree.current_branch, tree.branch_ends, tree.dropped = (
        position.at,
        position.branch,
        dict(names),
        set(dropped),
    )


def _decode(kind: type[Any], record: Mapping[str, Any], message: str) -> Any:
    """Convert a JSON object to a dataclass. Raises DamagedRecord with `message` and the reason if
    it does not fit.
    """
    try:
        return decode_value(kind, record, "")
    except ValueError as error:
        raise DamagedRecord(f"{message}: {error}") from None
