"""Which replica gets a request: prompts that begin alike go to the same one, whose cache has their
beginning.

Rendezvous hashing (Thaler and Ravishankar 1998): the replica whose name hashes highest together
with the prompt's key. When a replica comes or goes, only its own share of the keys moves.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")
FIRST = 1024  # characters of a prompt that count; where there is a system text, only that counts


def key_of(body: bytes) -> bytes:
    """The key of a request: the same for prompts that begin alike; empty for a body that says
    nothing about it.
    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return b""
    if not isinstance(document, dict):
        return b""
    begin = _beginning(document)
    return (
        hashlib.blake2b(begin[:FIRST].encode("utf-8", "replace"), digest_size=8).digest()
        if begin
        else b""
    )


def ranked(key: bytes, names: Iterable[T]) -> list[T]:
    """The names, best first."""

    def weight(name: T) -> bytes:
        return hashlib.blake2b(key + str(name).encode(), digest_size=8).digest()

    return sorted(names, key=weight, reverse=True)


def _beginning(document: dict[str, Any]) -> str:
    messages = document.get("messages") or document.get("input")
    if system := document.get("instructions") or document.get(
        "system"
    ):  # the latter Anthropic's and ollama's
        return _text(system)
    if isinstance(messages, list) and messages and isinstance(messages[0], dict):
        return _text(messages[0].get("content"))
    return _text(messages if messages is not None else document.get("prompt"))


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return json.dumps(content) if content else ""
