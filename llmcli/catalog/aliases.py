"""Adds, replaces and removes aliases in the user's models.toml, and leaves the other text of the
file as it is, with its comments and its order.

Before the new text is written, it is parsed and compared with the old content. If anything but the
alias differs, an error is raised and the file is not changed.
"""

import tomllib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmcli.atomic_files import write_atomically
from llmcli.catalog import catalog, toml_file
from llmcli.catalog.catalog import NAME_PATTERN
from llmcli.catalog.model_ref import parse_ref
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.text_input import require_utf8

if TYPE_CHECKING:
    from tomlkit.items import Item


def write_alias(
    config: Config,
    name: str,
    target: str,
    system: str | None,
    settings: Mapping[str, Any],
    force: bool,
) -> bool:
    """Make `name` an alias of the model `target`, with an optional system text and settings. Return
    whether the catalog already had the name.

    Raises UserError if the catalog has the name and `force` is not set, if the name is invalid, if
    there is no model `target`, or if the user's file cannot be edited safely.
    """
    entries = catalog.load_catalog(config)
    if not NAME_PATTERN.fullmatch(name):
        raise UserError(
            f"{name!r} is not a valid name",
            hint="use letters, digits and . _ -, with one optional :TAG",
        )
    if name in entries and not force:
        existing = entries[name]
        description = "one of your aliases" if existing.alias else f"a model of {existing.origin}"
        raise UserError(
            f"{name} is already {description}", hint="choose another name, or use --force"
        )
    other_entries = {key: entry for key, entry in entries.items() if key != name}
    ref = parse_ref(target, other_entries, config)
    # A file is stored by its absolute path, so that the alias works in every folder, and a name
    # without a tag by its full name, so that the alias keeps its meaning.
    is_completed = ref.kind == "path" or ref.has_default_tag
    table: dict[str, Any] = {"alias": ref.full_name if is_completed else target}
    if system is not None:
        table["system"] = system
    if settings:
        table["settings"] = dict(settings)
    _write_entry(config, name, table)
    return name in entries


def delete_alias(config: Config, name: str) -> None:
    """Remove an alias from the user's file. The weights of its model stay on the disk. Raises
    UserError if the file cannot be edited safely.
    """
    _write_entry(config, name, None)


def _write_entry(config: Config, name: str, table: Mapping[str, Any] | None) -> None:
    """Replace the entry `name` in the user's file by `table`; None removes the entry. Raises
    UserError if the edited text would differ in anything else.
    """
    from tomlkit.exceptions import TOMLKitError

    path = config.user_catalog
    text = toml_file.read_toml_text(path) if path.is_file() else ""
    before = toml_file.parse_toml(path, text)
    expected = {key: value for key, value in before.get("models", {}).items() if key != name}
    if table:
        expected[name] = dict(table)
    try:
        after = _edit_text(text, name, table)
        is_safe = tomllib.loads(after) == {**before, "models": expected} or (
            not expected and tomllib.loads(after) in ({}, {"models": {}})
        )
    except (tomllib.TOMLDecodeError, TOMLKitError):
        is_safe = False
    if not is_safe:
        raise UserError(
            f"llmcli cannot safely edit {name} in {path}",
            hint=f"edit {path} by hand",
        )
    require_utf8("the alias", after)
    write_atomically(path, after.encode("utf-8"))


def _edit_text(text: str, name: str, table: Mapping[str, Any] | None) -> str:
    """Return the TOML text with the entry `name` replaced by `table`, or without the entry if
    `table` is None. All tables of the entry are removed. The new table is written where the first
    of them was, or at the end of the text.
    """
    import tomlkit
    from tomlkit.items import Table, Whitespace

    document = tomlkit.parse(text)
    block = tomlkit.dumps({"models": {name: dict(table)}}) if table else ""
    for key, models in document.body:
        if key is None or key.key != "models" or not isinstance(models, Table):
            continue
        entries = models.value.body
        for index, (entry_key, entry) in enumerate(entries):
            if (
                isinstance(entry, Table)
                and entry_key is not None
                and entry_key.key == name
                and not entry_key.is_dotted()
            ):
                # For tomlkit, comments before the next table are a part of this table. They must
                # stay. Whitespace is an item whose text is written unchanged.
                entries[index] = (None, Whitespace(block + _final_comments(entry)))
                block = ""
    after = tomlkit.dumps(document).rstrip("\n")
    return (f"{after}\n\n{block}" if after and block else after + block).rstrip("\n") + "\n"


def _final_comments(item: "Item") -> str:
    """Return the blank lines and comments after the last value of a table, as text."""
    from tomlkit.items import AoT, Table

    if isinstance(item, AoT):
        return _final_comments(item.body[-1])
    comments = ""
    for key, value in reversed(item.value.body) if isinstance(item, Table) else ():
        if key is not None:
            return _final_comments(value) + comments
        comments = value.as_string() + comments
    return comments
