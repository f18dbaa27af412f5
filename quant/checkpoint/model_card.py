"""The model card of a checkpoint: the YAML at the beginning of README.md, reduced to strings and
lists of strings, and the parent models that it names.

The card is untrusted. Its size and depth are limited, and aliases are refused, because they could
expand to any size.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Maximum bytes of the YAML. Cards with tables of results are the largest.
MAX_HEAD_BYTES = 1 << 18
# maximum number of characters in a string, and of entries in a list or in the card
MAX_TEXT_CHARS, MAX_ITEMS = 1000, 100
# Maximum levels of nesting. libyaml builds nested values by recursion in C, and scans them in
# quadratic time.
MAX_DEPTH = 32
REPO_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
EMPTY_WORDS = ("", "~", "null", "none")
PARENT_KEYS = ("base_model", "base_models", "base_model_sources")

Card = dict[str, str | list[str]]


def load_card(folder: Path) -> Card:
    """Return the model card of a checkpoint folder as a dictionary, or {} if the folder has no
    readable card. Values that are not strings or lists of strings are left out.
    """
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
    """Return whether the YAML text is nested at most MAX_DEPTH levels deep and contains no aliases.
    Parsing stops at the first event that exceeds a limit.
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
    """Return one entry of the card without strings that _is_text() rejects. A value of another
    type, and a rejected single string, become "".
    """
    key, value = item
    if isinstance(value, list):
        return key, [text for text in value[:MAX_ITEMS] if isinstance(text, str) and _is_text(text)]
    return key, value if isinstance(value, str) and _is_text(value) else ""


def _is_text(text: str) -> bool:
    """Return whether a string is usable: not too long, not a word for an empty value, and without
    half of a surrogate pair.
    """
    has_lone_surrogate = any("\ud800" <= letter <= "\udfff" for letter in text)
    return (
        len(text) <= MAX_TEXT_CHARS
        and text.strip().lower() not in EMPTY_WORDS
        and not has_lone_surrogate
    )


def parent_repos(card: Card) -> list[str]:
    """Return the names of the Hugging Face repositories that the card names as the
    model's parents.
    """
    for key in PARENT_KEYS:
        if value := card.get(key):
            return [
                name
                for name in ([value] if isinstance(value, str) else value)
                if REPO_NAME.fullmatch(name)
            ]
    return []


def find_parent(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the name of the repository of the model from which this checkpoint was made, or None.
    The model card is searched first, then config.json.
    """
    name_in_config = config.get("_name_or_path")
    names = [
        *parent_repos(load_card(folder)),
        *(
            [name_in_config]
            if isinstance(name_in_config, str) and REPO_NAME.fullmatch(name_in_config)
            else []
        ),
    ]
    return names[0] if names else None
