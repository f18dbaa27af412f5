"""Reads the nested nodes of a tokenizer.json. A node is a JSON object that describes one step of a
tokenizer: a normalizer, a pre-tokenizer or a post-processor.

The files are untrusted: nodes may be nested as deep as a JSON reader allows, so no function here is
recursive.
"""

from typing import Any


def flatten_sequence(node: Any, key: str) -> list[Any]:
    """Return the steps of a node in order, with each nested Sequence replaced by its steps. A node
    that is not a Sequence is returned as the only step, even if it is None.

    `key` is the field in which this kind of Sequence lists its steps: "normalizers",
    "pretokenizers" or "processors".
    """
    steps, pending = [], [node]
    while pending:
        step = pending.pop()
        if (
            isinstance(step, dict)
            and step.get("type") == "Sequence"
            and isinstance(step.get(key), list)
        ):
            pending.extend(reversed(step[key]))
        else:
            steps.append(step)
    return steps


def name_step(node: Any) -> str:
    """Return the name of a node for an error message, with its pattern if it has one."""
    if not isinstance(node, dict):
        return repr(node)[:60]
    pattern = node.get("pattern")
    return (
        f"{node.get('type')!s} {pattern}"[:80]
        if pattern is not None
        else f"{node.get('type')!s}"[:60]
    )


def prepends_space(metaspace: dict[str, Any]) -> bool:
    """Return whether a Metaspace node adds a space in front of a text. The setting has an older
    form (add_prefix_space) and a newer one (prepend_scheme). If both are missing, a space is added.
    """
    scheme = metaspace.get(
        "prepend_scheme", "never" if metaspace.get("add_prefix_space") is False else "always"
    )
    return bool(scheme != "never")
