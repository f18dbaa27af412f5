"""The catalog: a list of model names with their sources and default settings. It is read from two
models.toml files. Entries of the user's file replace built-in entries of the same name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import llmcli
from llmcli.catalog import toml_file
from llmcli.catalog.spec import Spec, WeightFile
from llmcli.config import Config
from llmcli.errors import UserError

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(:[A-Za-z0-9._-]+)?")
# A package name or version. The pattern is strict because both become parts of a folder name and
# arguments of pip.
PACKAGE_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
MAX_MESSAGE = 300  # characters of an error's message; a name may be long
SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")
ENTRY_KEYS = {
    "description",
    "license",
    "quant",
    "system",
    "settings",
    "sources",
    "alias",
    "original",
    "default",
    "draft",
}
# The keys whose values are text.
TEXT_KEYS = ENTRY_KEYS - {"settings", "sources", "default"}


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """An entry of the catalog: a model name and what it stands for.

    - `origin`: the models.toml file that contains the entry.
    - `quant`: the type to which a float checkpoint is quantized by default.
    - `system`, `settings`: default system text and sampling settings.
    - `sources`: where the weights can be downloaded, in order of preference. `alias`: the name of
      another model that this name stands for. An entry has either of these.
    - `original`: hub repository with the float weights from which a GGUF was made.
    - `draft`: the name of a smaller model with the same vocabulary, for --model-draft.
    - `is_default`: whether the part of the name before the colon means this entry.
    """

    name: str
    origin: Path
    description: str = ""
    license: str = ""
    quant: str = "Q4_K_M"
    system: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    sources: tuple[Spec, ...] = ()
    alias: str = ""
    original: str = ""
    draft: str = ""
    is_default: bool = False


class InvalidSource(ValueError):
    """Raised if a source in a catalog file is described wrongly. Its text says what is wrong."""


def builtin_catalog_path() -> Path:
    """Return the path of the built-in models.toml. It is in the installed package or, in a git
    checkout, in the folder above the package.
    """
    package = Path(llmcli.__file__).parent
    packaged = package / "models.toml"
    return packaged if packaged.is_file() else package.parent / "models.toml"


def load_catalog(config: Config) -> dict[str, CatalogEntry]:
    """Return all entries of both files by name. Raises UserError with file and line if a file is
    wrong.
    """
    entries = read_catalog(builtin_catalog_path())
    if config.user_catalog.is_file():
        entries |= read_catalog(config.user_catalog)
    return entries


def read_catalog(path: Path) -> dict[str, CatalogEntry]:
    """Return the entries of one models.toml by name. Raises UserError if it cannot be read or is
    wrong.
    """
    text = toml_file.read_toml_text(path)
    document = toml_file.parse_toml(path, text)
    table = document.get("models", {})
    # serve_table.py reads the other table.
    if unknown := [key for key in document if key not in ("models", "serve")]:
        raise catalog_error(
            path,
            text,
            unknown[0],
            f'unknown key {unknown[0]!r}; tables must be named [models."NAME"] or [serve."NAME"]',
        )
    if not isinstance(table, dict):
        raise catalog_error(path, text, "models", "`models` must be a table")
    return {name: _parse_entry(path, text, name, value) for name, value in table.items()}


def _parse_entry(path: Path, text: str, name: str, value: Any) -> CatalogEntry:
    """Return the entry `name`, whose parsed TOML is `value`. Raises UserError if it is wrong.
    `path`, `text`: the file and its text, for the line number in the error.
    """

    def check(is_valid: bool, message: str) -> None:
        if not is_valid:
            raise catalog_error(path, text, name, f"{name}: {message}")

    check(
        NAME_PATTERN.fullmatch(name) is not None,
        "a name must be letters, digits and . _ -, with one optional :TAG",
    )
    check(isinstance(value, dict), "must be a table")
    check(
        not (extra := sorted(set(value) - ENTRY_KEYS)),
        f"unknown key {extra}; allowed are {', '.join(sorted(ENTRY_KEYS))}",
    )
    for key in TEXT_KEYS:
        check(isinstance(value.get(key, ""), str), f"`{key}` must be text")
    check(isinstance(value.get("default", False), bool), "`default` must be true or false")
    settings, sources = value.get("settings", {}), value.get("sources", [])
    check(isinstance(settings, dict), "`settings` must be a table")
    check(
        isinstance(sources, list) and all(isinstance(item, dict) for item in sources),
        "`sources` must be tables",
    )
    check(bool(sources) != bool(value.get("alias")), "needs either `sources` or `alias`")
    try:
        specs = tuple(_parse_source(item) for item in sources)
    except InvalidSource as error:
        raise catalog_error(path, text, name, f"{name}: {error}") from None
    text_fields = {key: value[key] for key in TEXT_KEYS if key in value}
    return CatalogEntry(
        name,
        path,
        settings=settings,
        sources=specs,
        is_default=value.get("default", False),
        **text_fields,
    )


def _parse_source(table: dict[str, Any]) -> Spec:
    """Return the source that a TOML table describes. Raises InvalidSource if the table is wrong."""
    from llmcli.catalog.sources import SOURCES  # lazy: most commands need no source

    source = SOURCES.get(str(table.get("kind")))
    if source is None:
        raise InvalidSource(
            f"`kind` of a source must be one of {', '.join(SOURCES)}, not {table.get('kind')!r}"
        )
    types = {"bytes": int, "parts": list}
    names = [spec_field.name for spec_field in fields(Spec)]
    for name in names:
        if name in table and type(table[name]) is not types.get(name, str):
            raise InvalidSource(f"`{name}` of a source has the wrong type")
    if extra := sorted(set(table) - set(names)):
        raise InvalidSource(f"unknown key {extra} in a source")
    if missing := [key for key in source.required_fields if not table.get(key)]:
        raise InvalidSource(f"a source of kind {source.name} needs `{missing[0]}`")
    parts = tuple(_parse_part(part) for part in table.get("parts", ()))
    if not SHA256_PATTERN.fullmatch(table.get("sha256") or "0" * 64):
        raise InvalidSource("`sha256` must be 64 digits 0-9 a-f")
    return Spec(**{**table, "parts": parts})


def _parse_part(table: Any) -> WeightFile:
    """Return the file in a wheel that an element of `parts` describes. Raises InvalidSource if the
    element is wrong.
    """
    try:
        part = WeightFile(**table)
    except TypeError:  # not a table, or a key is missing or unknown
        raise InvalidSource(
            "a part must be a table of package, version, member, bytes and member_bytes"
        ) from None
    sizes = (part.bytes, part.member_bytes)
    if not isinstance(part.member, str) or any(type(size) is not int for size in sizes):
        raise InvalidSource(
            "`member` of a part must be text, `bytes` and `member_bytes` must be numbers"
        )
    for text in (part.package, part.version):
        if not isinstance(text, str) or not PACKAGE_PATTERN.fullmatch(text):
            raise InvalidSource(f"{text!r} is not a valid package name or version")
    return part


def catalog_error(path: Path, text: str, word: str, message: str) -> UserError:
    """Return the error for something wrong in the file `path`, whose content is `text`. Its line
    number is that of the first line that contains `word`.
    """
    line = next((number for number, line in enumerate(text.splitlines(), 1) if word in line), 1)
    short = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}…"
    return UserError(f"{path}, line {line}: {short}", hint=f"correct it in {path}")
