"""The catalog: models.toml files parsed into entries.

The built-in file comes first; the user's file adds to it and overrides it.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import llmcli
from llmcli.catalog.spec import Spec, WeightFile
from llmcli.config import Config
from llmcli.errors import UserError

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(:[A-Za-z0-9._-]+)?")
# A package name or version. Both are used in a folder name and as arguments of pip.
PACKAGE_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
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
}


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One entry of the catalog: a name, and the model that it stands for.

    An entry has either `sources`, or an `alias` that names another model. `original` is the hub
    repository with the float weights that a GGUF was made from. `origin` is the models.toml file
    that defines the entry.
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


class InvalidSource(ValueError):
    """An error in an entry's description of a source. The exception's text is the reason."""


def builtin_catalog_path() -> Path:
    """Return the path of the built-in models.toml: in the package, or at the top of a checkout of
    it.
    """
    package = Path(llmcli.__file__).parent
    inside = package / "models.toml"
    return inside if inside.is_file() else package.parent / "models.toml"


def load_catalog(config: Config) -> dict[str, CatalogEntry]:
    """Return every entry by name; the user's entries override the built-in ones.

    Raises UserError that names the file and line of an error in a catalog.
    """
    entries = read_catalog(builtin_catalog_path())
    if config.user_catalog.is_file():
        entries |= read_catalog(config.user_catalog)
    return entries


def read_catalog(path: Path) -> dict[str, CatalogEntry]:
    """Read the entries of one models.toml. Raises UserError."""
    text = _text(path)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(
            f"{path}: {error}", hint=f"correct that line of {path}, or rename the file"
        ) from None
    table = document.get("models", {})
    if unknown := [key for key in document if key != "models"]:
        raise _wrong(
            path,
            text,
            unknown[0],
            f'unknown key {unknown[0]!r}; tables must be named [models."NAME"]',
        )
    if not isinstance(table, dict):
        raise _wrong(path, text, "models", "`models` must be a table")
    return {name: _entry(path, text, name, value) for name, value in table.items()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise UserError(
            f"{path}: line {line} is not UTF-8 text", hint=f"correct that line of {path}"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _entry(path: Path, text: str, name: str, value: Any) -> CatalogEntry:
    def check(fine: bool, message: str) -> None:
        if not fine:
            raise _wrong(path, text, name, f"{name}: {message}")

    check(
        NAME_PATTERN.fullmatch(name) is not None,
        "a name must be letters, digits and . _ -, with one optional :TAG",
    )
    check(isinstance(value, dict), "must be a table")
    check(
        not (extra := sorted(set(value) - ENTRY_KEYS)),
        f"unknown key {extra}; allowed are {', '.join(sorted(ENTRY_KEYS))}",
    )
    for key in ENTRY_KEYS - {"settings", "sources"}:
        check(isinstance(value.get(key, ""), str), f"`{key}` must be text")
    settings, sources = value.get("settings", {}), value.get("sources", [])
    check(isinstance(settings, dict), "`settings` must be a table")
    check(
        isinstance(sources, list) and all(isinstance(item, dict) for item in sources),
        "`sources` must be tables",
    )
    check(bool(sources) != bool(value.get("alias")), "needs either `sources` or `alias`")
    try:
        specs = tuple(_spec(item) for item in sources)
    except InvalidSource as error:
        raise _wrong(path, text, name, f"{name}: {error}") from None
    plain = {key: value[key] for key in ENTRY_KEYS - {"settings", "sources"} if key in value}
    return CatalogEntry(name, path, settings=settings, sources=specs, **plain)


def _spec(table: dict[str, Any]) -> Spec:
    """Return the source that a table describes. Raises InvalidSource."""
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
    parts = tuple(_weight_file(part) for part in table.get("parts", ()))
    if not SHA256_PATTERN.fullmatch(table.get("sha256") or "0" * 64):
        raise InvalidSource("`sha256` must be 64 digits 0-9 a-f")
    return Spec(**{**table, "parts": parts})


def _weight_file(table: Any) -> WeightFile:
    """Return the wheel member that an entry of `parts` describes. Raises InvalidSource."""
    try:
        part = WeightFile(**table)
    except TypeError:  # `table` is not a table, or a key of it is missing or unknown
        raise InvalidSource(
            "a part must be a table of package, version, member and bytes"
        ) from None
    if not isinstance(part.member, str) or type(part.bytes) is not int:
        raise InvalidSource("`member` of a part must be text and `bytes` a number")
    for text in (part.package, part.version):
        if not isinstance(text, str) or not PACKAGE_PATTERN.fullmatch(text):
            raise InvalidSource(f"{text!r} is not a valid package name or version")
    return part


def _wrong(path: Path, text: str, word: str, message: str) -> UserError:
    """Return a UserError for an error in the file `path`, whose content is `text`.

    The error names the line that contains `word` first.
    """
    line = next((number for number, line in enumerate(text.splitlines(), 1) if word in line), 1)
    return UserError(f"{path}, line {line}: {message}", hint=f"correct it in {path}")
