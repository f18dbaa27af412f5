"""Writes and reads saved chats, the files state/saved/NAME.jsonl of /save and /load.

The first line contains the settings and the current position in the tree. Each further line is one
turn (turn_records.py). The older format 1, with one message on each line, can also be read.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llmcli.atomic_files import write_atomically
from llmcli.chat.conversation import turn_records
from llmcli.chat.conversation.conversation import Conversation
from llmcli.chat.conversation.stored_conversation import StoredConversation
from llmcli.chat.conversation.turn_tree import TurnTree
from llmcli.config import Config
from llmcli.errors import UserError
from quant.json_dataclasses import decode_value

FORMAT_VERSION = 2
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
ROLE_ORDER = ("user", "assistant")  # of the messages in format 1


@dataclass(frozen=True, slots=True)
class ChatHead:
    """The first line of a saved chat, without the position in the tree and the constraint. `chat`:
    the version of the format.
    """

    chat: Literal[1, 2]
    settings: Mapping[str, Any]
    model: str = ""
    system: str | None = None
    predict: int | None = None
    on_full: str = ""
    server: str = ""


def list_names(config: Config) -> list[str]:
    """Return the names of all saved chats in alphabetical order."""
    return sorted(path.stem for path in (config.state / "saved").glob("*.jsonl"))


def save_chat(
    conversation: Conversation, config: Config, name: str, model: str, server: str = ""
) -> tuple[Path, bool]:
    """Save the conversation under `name`. `model`: name of the model. `server`: address of the
    server that has it, "" for none. Return the path of the file, and whether it replaced another
    file. Raises UserError if the name is invalid or the file cannot be written.
    """
    path = chat_path(config, name)
    head = {
        "chat": FORMAT_VERSION,
        "model": model,
        **({"server": server} if server else {}),
        "system": conversation.system,
        "predict": conversation.predict,
        "settings": conversation.sampling.as_dict(),
        "on_full": conversation.on_full,
        "format": turn_records.build_constraint_record(conversation.constraint),
        **turn_records.build_position_record(conversation.tree),
    }
    lines = [head, *map(turn_records.build_turn_record, conversation.tree.turns)]
    replaced = path.exists()
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    # Only the user may read the file.
    write_atomically(path, text.encode("utf-8", "surrogatepass"), mode=0o600)
    return path, replaced


def read_chat(path: Path) -> StoredConversation:
    """Read a saved chat. Raises UserError with the line number if a line is damaged, and OSError if
    the file cannot be read.
    """
    records = (
        _parse_line(path, number, raw)
        for number, raw in enumerate(turn_records.read_lines(path), 1)
    )
    first_line = next(records, {})
    try:
        head: ChatHead = decode_value(ChatHead, first_line, "")
    except ValueError as error:
        raise _damaged_line(path, 1, f"it is not the first line of a saved chat: {error}") from None
    tree = (
        _parse_first_format(path, records)
        if head.chat == 1
        else _parse_turns(path, first_line, records)
    )
    conversation = StoredConversation(
        tree, head.model, head.settings, head.system, head.predict, head.on_full
    )
    conversation.server = head.server
    try:
        conversation.read_constraint(first_line)
    except turn_records.DamagedRecord as error:
        raise _damaged_line(path, 1, str(error)) from None
    return conversation


def _parse_turns(path: Path, head: dict[str, Any], lines: Iterator[dict[str, Any]]) -> TurnTree:
    """Return the tree of a chat of the current format. `head`: the first line of the file, with the
    position; `lines`: the other lines. Raises UserError if a line is damaged.
    """
    tree = TurnTree()
    for number, line in enumerate(lines, 2):
        try:
            turn_records.add_turn(tree, line)
        except turn_records.DamagedRecord as error:
            raise _damaged_line(path, number, str(error)) from None
    try:
        turn_records.restore_position(tree, head)
    except turn_records.DamagedRecord as error:
        raise _damaged_line(path, 1, str(error)) from None
    return tree


def _parse_first_format(path: Path, lines: Iterator[dict[str, Any]]) -> TurnTree:
    """Return the tree of a chat of format 1, whose `lines` after the first are single messages.
    Raises UserError if a line is damaged.
    """
    tree, contents = TurnTree(), [""]
    for number, line in enumerate(lines, 2):
        role, content = line.get("role"), line.get("content")
        expected_role = ROLE_ORDER[number % 2]
        if role != expected_role or not isinstance(content, str):
            raise _damaged_line(path, number, f"expected a message of the {expected_role}")
        if role == "assistant":
            tree.add_turn(contents[-1], content, is_stopped=bool(line.get("cut")))
        contents.append(content)
    if not len(contents) % 2:
        raise _damaged_line(path, len(contents), "the last answer is missing")
    return tree


def _parse_line(path: Path, number: int, raw: bytes) -> dict[str, Any]:
    """Return the JSON object on a line. Raises UserError if there is none. `number`: line number
    from 1.
    """
    try:
        return turn_records.parse_line(raw)
    except turn_records.DamagedRecord as error:
        raise _damaged_line(path, number, str(error)) from None


def _damaged_line(path: Path, number: int, reason: str) -> UserError:
    """Return the error that says which line of the file is damaged, and why."""
    return UserError(
        f"{path}: line {number} is damaged: {reason}",
        hint=f"correct that line of {path}, or /load another chat",
    )


def chat_path(config: Config, name: str) -> Path:
    """Return the path of the saved chat `name`, which may not exist. Raises UserError if the name
    is invalid.
    """
    if not NAME_PATTERN.fullmatch(name):
        raise UserError(
            f"{name!r} is not a valid chat name",
            hint="use letters, digits and . _ - (at most 100)",
        )
    return config.state / "saved" / f"{name}.jsonl"
