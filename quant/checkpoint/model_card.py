"""A checkpoint's model card: the YAML at the head of README.md as plain strings, and the parent
models that it names.

The card is untrusted: its size and depth are bounded, aliases are refused, and only strings and
lists of strings are returned.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_HEAD_BYTES = 1 << 18  # most bytes of the YAML; cards with tables of results are the largest
# most characters of a string; most entries of a list or of the card
MAX_TEXT_CHARS, MAX_ITEMS = 1000, 100
# most levels of nesting: libyaml builds nested values by recursion in C and scans them in quadratic
# time
MAX_DEPTH = 32
REPO_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
EMPTY_WORDS = ("", "~", "null", "none")
PARENT_KEYS = ("base_model", "base_models", "base_model_sources")

Card = dict[str, str | list[str]]


def load_card(folder: Path) -> Card:
    """Return the model card of a folder, or {} if there is none that can be read."""
    import yaml

    try:
        with (folder / "README.md").open("rb") as file:
            lines = file.read(MAX_HEAD_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return {}
    if not lines or lines[0].strip() != "---" or "---" not in lines[1:]:
        return {}
    text = "\n".join(lines[1 : lines.index("---", 1)]).replace("\t", "  ")
    # The base loader keeps every scalar a string: "no" is the language Norwegian, not False.
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    try:
        values = yaml.load(text, loader) if _is_bounded(text, loader) else None
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}
    return (
        {key: value for key, value in map(_clean_entry, _items(values)) if value}
        if isinstance(values, dict)
        else {}
    )


def _is_bounded(text: str, loader: Any) -> bool:
    """Return whether the text is nested at most MAX_DEPTH deep and has no aliases.

    Stops parsing as soon as a limit is exceeded.
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


def _clean_entry(item: tuple[str, Any]) -> tuple[str, str | list[str]]:
    """Return one entry of the card without strings that are too long or contain lone surrogates."""
    key, value = item
    if isinstance(value, list):
        return key, [text for text in value[:MAX_ITEMS] if isinstance(text, str) and _is_text(text)]
    return key, value if isinstance(value, str) and _is_text(value) else ""


def _is_text(text: str) -> bool:
    half = any("\ud800" <= letter <= "\udfff" for letter in text)  # half a surrogate pair
    return len(text) <= MAX_TEXT_CHARS and text.strip().lower() not in EMPTY_WORDS and not half


def parent_repos(card: Card) -> list[str]:
    """Return the repositories that the card names as the model's parents."""
    for key in PARENT_KEYS:
        if value := card.get(key):
            return [
                name
                for name in ([value] if isinstance(value, str) else value)
                if REPO_NAME.fullmatch(name)
            ]
    return []


def find_parent(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the repository of the model that this checkpoint was made from, as the card or
    config.json names it, or None.
    """
    named = config.get("_name_or_path")
    names = [
        *parent_repos(load_card(folder)),
        *([named] if isinstance(named, str) and REPO_NAME.fullmatch(named) else []),
    ]
    return names[0] if names else None
