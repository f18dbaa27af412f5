"""Names of the user's own: one table in the user's models.toml, written without touching the rest.

The file is the user's: comments, order and whatever else stands there stay as they are. What the
text becomes is parsed before it is written; an edit that would change anything else is refused.
"""

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from llmcli.catalog import catalog
from llmcli.catalog.catalog import NAME
from llmcli.catalog.partial import write_whole
from llmcli.catalog.ref import parse
from llmcli.config import Config
from llmcli.errors import UserError

HEADER = re.compile(r"\s*\[\[?[^\[\]]+\]\]?\s*(#.*)?")


def write(
    config: Config,
    name: str,
    target: str,
    system: str | None,
    settings: Mapping[str, Any],
    force: bool,
) -> bool:
    """Make `name` stand for `target`; returns whether it stood for something before.

    Raises UserError if the name is taken (without `force`), if the target is unknown, or if the
    user's file is written in a way that cannot be edited safely.
    """
    entries = catalog.load(config)
    if not NAME.fullmatch(name):
        raise UserError(
            f"{name!r} cannot be a name", hint="letters, digits and . _ - with one optional :TAG"
        )
    if name in entries and not force:
        old = entries[name]
        where = "an alias of yours" if old.alias else f"a model of {old.origin}"
        raise UserError(f"{name} is already {where}", hint="choose another name, or --force")
    others = {key: entry for key, entry in entries.items() if key != name}
    found = parse(target, others, config)
    # A file is named from the root: the alias means the same in every folder.
    table: dict[str, Any] = {"alias": found.full if found.kind == "path" else target}
    if system is not None:
        table["system"] = system
    if settings:
        table["settings"] = dict(settings)
    _replace(config, name, table)
    return name in entries


def delete(config: Config, name: str) -> None:
    """Forget an alias of the user's file; the weights stay."""
    _replace(config, name, None)


def _replace(config: Config, name: str, table: Mapping[str, Any] | None) -> None:
    path = config.user_catalog
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    before = tomllib.loads(text)
    kept, place = _without(text, name)
    block = _render(name, table) if table else []
    lines = [*kept[:place], *block, *kept[place:]]
    if table and place and kept[place - 1].strip():
        lines.insert(place, "\n")
    after = "".join(lines).rstrip("\n") + "\n"
    wanted = {key: value for key, value in before.get("models", {}).items() if key != name}
    if table:
        wanted[name] = dict(table)
    try:
        fine = tomllib.loads(after) == {**before, "models": wanted} or (
            not wanted and tomllib.loads(after) in ({}, {"models": {}})
        )
    except tomllib.TOMLDecodeError:
        fine = False
    if not fine:
        raise UserError(
            f"{name} in {path} is written in a way that llmcli does not edit",
            hint=f"change it by hand in {path}",
        )
    try:
        data = after.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(
            "that is not UTF-8 text", hint="convert it first: iconv -f LATIN1 -t UTF-8"
        ) from None
    write_whole(path, data)


def _without(text: str, name: str) -> tuple[list[str], int]:
    """The lines without the tables of `name`, and where the first of them began (the end if none).

    Blank lines and comments that stand before the next table belong to that one.
    """
    kept: list[str] = []
    place: int | None = None
    ours = False
    held: list[
        str
    ] = []  # comments after our lines: whose they are shows when the next header comes
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    for number, line in enumerate(lines):
        if HEADER.fullmatch(line.rstrip("\n")) and _whole(lines[:number]):
            ours = _path(line)[:2] == ["models", name]
            if ours:
                place = len(kept) if place is None else place
            kept += [] if ours else held
            held = []
        if not ours:
            kept.append(line)
        elif not line.strip() or line.lstrip().startswith("#"):
            held.append(line)
        else:
            held = []
    kept += [line for line in held if line.lstrip().startswith("#")]
    return kept, len(kept) if place is None else place


def _whole(lines: list[str]) -> bool:
    """Whether a line after these begins afresh: what looks like a header may stand in a long
    string.
    """
    try:
        tomllib.loads("".join(lines))
    except tomllib.TOMLDecodeError:
        return False
    return True


def _path(header: str) -> list[str]:
    """The keys that a header line opens: [models."a:b".settings] -> models, a:b, settings."""
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
    """A TOML value; JSON's strings, numbers and booleans are TOML's, but for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
