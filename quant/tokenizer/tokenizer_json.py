"""Flattens the nested sequences of tokenizer.json.

The files are untrusted: sequences may be nested as deep as a JSON reader allows, so nothing here
recurses.
"""

from typing import Any


def flatten_sequence(node: Any, key: str) -> list[Any]:
    """Return the parts of a node in order, with nested sequences resolved.

    `key` is the field in which its kind of Sequence keeps the parts ("normalizers", ...). A node
    that is not a Sequence is its only part, including None.
    """
    parts, waiting = [], [node]
    while waiting:
        part = waiting.pop()
        if (
            isinstance(part, dict)
            and part.get("type") == "Sequence"
            and isinstance(part.get(key), list)
        ):
            waiting.extend(reversed(part[key]))
        else:
            parts.append(part)
    return parts


def prepends_space(metaspace: dict[str, Any]) -> bool:
    """Return whether a Metaspace adds a space in front of a text, in either spelling; the default
    is yes.
    """
    scheme = metaspace.get(
        "prepend_scheme", "never" if metaspace.get("add_prefix_space") is False else "always"
    )
    return bool(scheme != "never")
