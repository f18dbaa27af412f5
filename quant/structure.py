"""The nested sequences of a tokenizer.json, taken apart.

Files are untrusted: a sequence may lie in a sequence as deep as a JSON reader goes, so nothing
recurses here.
"""

from typing import Any


def flat(node: Any, key: str) -> list[Any]:
    """The parts of a node in their order; `key` is where its kind of Sequence keeps them
    ("normalizers" …).

    A node that is no Sequence is its own only part, None too.
    """
    found, waiting = [], [node]
    while waiting:
        part = waiting.pop()
        if (
            isinstance(part, dict)
            and part.get("type") == "Sequence"
            and isinstance(part.get(key), list)
        ):
            waiting.extend(reversed(part[key]))
        else:
            found.append(part)
    return found


def prepends(metaspace: dict[str, Any]) -> bool:
    """Whether a Metaspace puts a space in front of a text, in either spelling; unsaid, it does."""
    said = metaspace.get(
        "prepend_scheme", "never" if metaspace.get("add_prefix_space") is False else "always"
    )
    return bool(said != "never")
