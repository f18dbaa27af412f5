"""Helpers for the nested nodes of tokenizer.json; vocabulary.py reads the file.

The files are untrusted: sequences may be nested as deep as a JSON reader allows, so no function
here is recursive.
"""

from typing import Any


def flatten_sequence(node: Any, key: str) -> list[Any]:
    """Return the parts of a node in order, with nested sequences replaced by their parts.

    `key` is the field in which this kind of Sequence has its parts ("normalizers", ...). If a node
    is not a Sequence, it is its own only part, even if it is None.
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
    """Return whether a Metaspace step adds a space in front of a text. The setting has an older and
    a newer form; if both are missing, the answer is yes.
    """
    scheme = metaspace.get(
        "prepend_scheme", "never" if metaspace.get("add_prefix_space") is False else "always"
    )
    return bool(scheme != "never")
