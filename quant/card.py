"""A checkpoint's model card: the YAML at the head of README.md, as plain strings, and the parents
it names.

The card is written by strangers: its size and depth are bounded, aliases are not followed, nothing
but strings and lists of strings comes out. It knows no tensors.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_HEAD = 1 << 18  # bytes; cards with tables of results are the largest
MAX_TEXT, MAX_ITEMS = 1000, 100
MAX_DEPTH = 32  # libyaml builds what is nested by recursion in C, and scans it in squared time
REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
NOTHING = ("", "~", "null", "none")
PARENTS = ("base_model", "base_models", "base_model_sources")

Card = dict[str, str | list[str]]


def load(folder: Path) -> Card:
    """The card of a folder; {} where there is none, or none that can be read."""
    import yaml

    try:
        with (folder / "README.md").open("rb") as file:
            lines = file.read(MAX_HEAD).decode("utf-8", "replace").splitlines()
    except OSError:
        return {}
    if not lines or lines[0].strip() != "---" or "---" not in lines[1:]:
        return {}
    text = "\n".join(lines[1 : lines.index("---", 1)]).replace("\t", "  ")
    loader = getattr(
        yaml, "CBaseLoader", yaml.BaseLoader
    )  # every scalar is a string: "no" stays a language
    try:
        values = yaml.load(text, loader) if _harmless(text, loader) else None
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}
    return (
        {key: value for key, value in map(_plain, _items(values)) if value}
        if isinstance(values, dict)
        else {}
    )


def _harmless(text: str, loader: Any) -> bool:
    """Whether it is nested little and repeats nothing; looking stops at the first event that is too
    much.
    """
    import yaml

    depth = 0
    for event in yaml.parse(text, loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        if depth > MAX_DEPTH or isinstance(event, yaml.AliasEvent):
            return False
    return True


def _items(values: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in list(values.items())[:MAX_ITEMS] if isinstance(key, str)]


def _plain(item: tuple[str, Any]) -> tuple[str, str | list[str]]:
    """One entry with nothing but text that can be written: no surrogates, no endless strings."""
    key, value = item
    if isinstance(value, list):
        return key, [text for text in value[:MAX_ITEMS] if isinstance(text, str) and _good(text)]
    return key, value if isinstance(value, str) and _good(value) else ""


def _good(text: str) -> bool:
    half = any("\ud800" <= letter <= "\udfff" for letter in text)  # of a surrogate pair: no text
    return len(text) <= MAX_TEXT and text.strip().lower() not in NOTHING and not half


def parents(card: Card) -> list[str]:
    """Repositories the card says the model was made from."""
    for key in PARENTS:
        if value := card.get(key):
            return [
                name
                for name in ([value] if isinstance(value, str) else value)
                if REPO.fullmatch(name)
            ]
    return []


def parent(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The repository that this checkpoint was made from, where the card or config.json says so."""
    named = config.get("_name_or_path")
    found = [
        *parents(load(folder)),
        *([named] if isinstance(named, str) and REPO.fullmatch(named) else []),
    ]
    return found[0] if found else None
