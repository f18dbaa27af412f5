"""The tables `[serve."NAME"]` of the user's models.toml: how `llmcli serve` offers a model among
several.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from llmcli.catalog import toml_file
from llmcli.catalog.catalog import NAME_PATTERN, catalog_error
from llmcli.config import Config
from llmcli.units import parse_duration

MAX_ALIASES = 64
MAX_PARALLEL = 128  # answers at once


@dataclass(frozen=True, slots=True)
class ServeEntry:
    """A table `[serve."NAME"]`. None means that the option of the command line applies.

    - `name`: how requests name the model; `ref`: the model, if it has another name.
    - `aliases`: further names for requests.
    - `pin`: the model is loaded at the start, and never unloaded.
    - `keep_alive`: seconds for which an idle model stays loaded; infinite: forever.
    - the other fields: the options of `serve` with these names.
    """

    name: str
    ref: str = ""
    aliases: tuple[str, ...] = ()
    pin: bool = False
    keep_alive: float | None = None
    ctx_size: int | None = None
    parallel: int | None = None
    threads: int | None = None
    cache_type_k: str | None = None
    cache_type_v: str | None = None
    gpu_layers: str | None = None
    draft: str | None = None
    model_draft: str | None = None
    system: str | None = None

    @property
    def model_ref(self) -> str:
        """The name of the model on this machine."""
        return self.ref or self.name


TEXT_KEYS = (
    "ref",
    "cache_type_k",
    "cache_type_v",
    "gpu_layers",
    "draft",
    "model_draft",
    "system",
)
COUNT_KEYS = ("ctx_size", "parallel", "threads")
MAX_COUNTS = {"parallel": MAX_PARALLEL}
ENTRY_KEYS = tuple(field.name for field in fields(ServeEntry) if field.name != "name")


def load_serve_table(config: Config) -> dict[str, ServeEntry]:
    """Return the tables of the user's models.toml by name. Raises UserError with file and line if
    one is wrong.
    """
    path = config.user_catalog
    if not path.is_file():
        return {}
    text = toml_file.read_toml_text(path)
    table = toml_file.parse_toml(path, text).get("serve", {})
    if not isinstance(table, dict):
        raise catalog_error(path, text, "serve", "`serve` must be a table")
    return {name: _parse_entry(path, text, name, value) for name, value in table.items()}


def _parse_entry(path: Path, text: str, name: str, value: Any) -> ServeEntry:
    """Return the entry `name`, whose parsed TOML is `value`. `path`, `text`: the file and its text,
    for the line in the error that is raised if the entry is wrong.
    """

    def check(is_valid: bool, message: str) -> None:
        if not is_valid:
            raise catalog_error(path, text, f'serve."{name}', f"serve.{name}: {message}")

    check(isinstance(value, Mapping), 'must be a table [serve."NAME"]')
    extra = sorted(set(value) - set(ENTRY_KEYS))
    check(not extra, f"unknown key {extra}; allowed are {', '.join(ENTRY_KEYS)}")
    for key in TEXT_KEYS:
        check(isinstance(value.get(key, ""), str), f"`{key}` must be text")
    for key in COUNT_KEYS:
        count, most = value.get(key, 1), MAX_COUNTS.get(key, 1 << 31)
        check(
            type(count) is int and 0 < count <= most, f"`{key}` must be a number from 1 to {most}"
        )
    check(type(value.get("pin", False)) is bool, "`pin` must be true or false")
    aliases = value.get("aliases", [])
    check(
        isinstance(aliases, list)
        and len(aliases) <= MAX_ALIASES
        and all(isinstance(alias, str) and NAME_PATTERN.fullmatch(alias) for alias in aliases),
        "`aliases` must be names of letters, digits and . _ -, with one optional :TAG",
    )
    keep_alive: float | None = None
    if "keep_alive" in value:
        try:
            keep_alive = parse_duration(value["keep_alive"])
        except ValueError as error:
            check(False, f"`keep_alive`: {error}")
    return ServeEntry(
        **{**value, "name": name, "aliases": tuple(aliases), "keep_alive": keep_alive}
    )
