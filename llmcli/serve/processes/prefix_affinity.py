"""Chooses replicas by prompt prefix: prompts with the same beginning go to the same replica,
because its cache contains that beginning.

Uses rendezvous hashing (Thaler and Ravishankar 1998): each replica's name is hashed together with
the key, and the replica with the highest hash is chosen. When a replica is added or removed, only
its own share of the keys moves.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")
PREFIX_CHARACTERS = (
    # length of the hashed beginning of a prompt; with a system text, only that text is hashed
    1024
)


def prefix_key(body: bytes) -> bytes:
    """Return the key of a request. Prompts with the same beginning have the same key; a body
    without a prompt has an empty key.
    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return b""
    if not isinstance(document, dict):
        return b""
    beginning = _beginning(document)
    return (
        hashlib.blake2b(
            beginning[:PREFIX_CHARACTERS].encode("utf-8", "replace"), digest_size=8
        ).digest()
        if beginning
        else b""
    )


def rank_replicas(key: bytes, names: Iterable[T]) -> list[T]:
    """Return the names in the order of preference for this key."""

    def weight(name: T) -> bytes:
        return hashlib.blake2b(key + str(name).encode(), digest_size=8).digest()

    return sorted(names, key=weight, reverse=True)


def _beginning(document: dict[str, Any]) -> str:
    messages = document.get("messages") or document.get("input")
    # Anthropic's and ollama's requests have the system text in `system`.
    if system := document.get("instructions") or document.get("system"):
        return _text(system)
    if isinstance(messages, list) and messages and isinstance(messages[0], dict):
        return _text(messages[0].get("content"))
    return _text(messages if messages is not None else document.get("prompt"))


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return json.dumps(content) if content else ""
