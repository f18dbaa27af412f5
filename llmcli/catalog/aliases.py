"""Adds and removes aliases in the user's models.toml, without touching the rest of the file.

Comments, order and all other tables stay as they are. The new text is parsed before it is written,
and an edit that would change anything else is refused.
"""

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from llmcli.atomic_files import write_atomically
from llmcli.catalog import catalog
from llmcli.catalog.catalog import NAME_PATTERN
from llmcli.catalog.model_ref import parse_ref
from llmcli.config import Config
from llmcli.errors import UserError

TABLE_HEADER = re.compile(r"\s*\[\[?[^\[\]]+\]\]?\s*(#.*)?")


def write_alias(
    config: Config,
    name: str,
    target: str,
    system: str | None,
    settings: Mapping[str, Any],
    force: bool,
) -> bool:
    """Make `name` an alias of `target`; return whether `name` existed before.

    Raises UserError if the name is taken and `force` is not set, if the target is unknown, or if
    the user's file is written in a way that cannot be edited safely.
    """
    entries = catalog.load_catalog(config)
    if not NAME_PATTERN.fullmatch(name):
        raise UserError(
            f"{name!r} is not a valid name",
            hint="use letters, digits and . _ -, with one optional :TAG",
        )
    if name in entries and not force:
        old = entries[name]
        owner = "one of your aliases" if old.alias else f"a model of {old.origin}"
        raise UserError(f"{name} is already {owner}", hint="choose another name, or use --force")
    other_entries = {key: entry for key, entry in entries.items() if key != name}
    ref = parse_ref(target, other_entries, config)
    # A file is stored by its absolute path, so that the alias works in every folder.
    table: dict[str, Any] = {"alias": ref.full_name if ref.kind == "path" else target}
    if system is not None:
        table["system"] = system
    if settings:
        table["settings"] = dict(settings)
    _replace(config, name, table)
    return name in entries


def delete_alias(config: Config, name: str) -> None:
    """Remove an alias from the user's file; downloaded weights stay."""
    _replace(config, name, None)


def _replace(config: Config, name: str, table: Mapping[str, Any] | None) -> None:
    path = config.user_catalog
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    before = tomllib.loads(text)
    lines_before, position = _without(text, name)
    block = _render(name, table) if table else []
    lines = [*lines_before[:position], *block, *lines_before[position:]]
    if table and position and lines_before[position - 1].strip():
        lines.insert(position, "\n")
    after = "".join(lines).rstrip("\n") + "\n"
    expected = {key: value for key, value in before.get("models", {}).items() if key != name}
    if table:
        expected[name] = dict(table)
    try:
        is_safe = tomllib.loads(after) == {**before, "models": expected} or (
            not expected and tomllib.loads(after) in ({}, {"models": {}})
        )
    except tomllib.TOMLDecodeError:
        is_safe = False
    if not is_safe:
        raise UserError(
            f"llmcli cannot safely edit {name} in {path}",
            hint=f"edit {path} by hand",
        )
    try:
        data = after.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(
            "the alias is not UTF-8 text", hint="convert it first: iconv -f LATIN1 -t UTF-8"
        ) from None
    write_atomically(path, data)


def _without(text: str, name: str) -> tuple[list[str], int]:
    """Return the lines without the tables of `name`, and the index where the first table was.

    The index is the end of the file if there was none. Blank lines and comments before the next
    table belong to that table.
    """
    kept: list[str] = []
    position: int | None = None
    is_ours = False
    # Comments after our lines: the next header shows whether they belong to it.
    pending_comments: list[str] = []
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    for number, line in enumerate(lines):
        if TABLE_HEADER.fullmatch(line.rstrip("\n")) and _whole(lines[:number]):
            is_ours = _path(line)[:2] == ["models", name]
            if is_ours:
                position = len(kept) if position is None else position
            kept += [] if is_ours else pending_comments
            pending_comments = []
        if not is_ours:
            kept.append(line)
        elif not line.strip() or line.lstrip().startswith("#"):
            pending_comments.append(line)
        else:
            pending_comments = []
    kept += [line for line in pending_comments if line.lstrip().startswith("#")]
    return kept, len(kept) if position is None else position


def _whole(lines: list[str]) -> bool:
    """Return whether a new statement can begin after `lines`.

    A line that looks like a table header may be part of a multi-line string.
    """
    try:
        tomllib.loads("".join(lines))
    except tomllib.TOMLDecodeError:
        return False
    return True


def _path(header: str) -> list[str]:
    """Return the keys of a header line: [models."a:b".settings] -> models, a:b, settings."""
    try:
        value: Any = tomllib.loads(header)
    except tomllib.TOMLDecodeError:
        return []
    keys: list[str] = []
    while isinstance(value, dict) and value:
        key = next(iter(value))
        keys.append(key)
        value = value[key]
        value = value[0] if isinstance(value, list) and value else value
    return keys


def _render(name: str, table: Mapping[str, Any]) -> list[str]:
    lines = [f'[models."{name}"]\n']
    lines += [f"{key} = {_value(table[key])}\n" for key in ("alias", "system") if key in table]
    if settings := table.get("settings"):
        lines += [
            f'\n[models."{name}".settings]\n',
            *(f"{key} = {_value(value)}\n" for key, value in settings.items()),
        ]
    return [*lines, "\n"]


def _value(value: Any) -> str:
    """Format a TOML value. JSON strings, numbers and booleans are valid TOML, except for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
