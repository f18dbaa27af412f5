"""Chooses a replica by the beginning of the prompt: prompts with the same beginning go to the same
replica, because its KV cache contains that beginning.

It uses rendezvous hashing (Thaler and Ravishankar 1998): each replica's name is hashed together
with the key of the prompt, and the replica with the highest hash is chosen. When a replica is added
or removed, only the keys of that replica move.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from llmcli.api.conversation.billing_header import cacheable_system

T = TypeVar("T")
PREFIX_CHARACTERS = 1024  # length of the beginning of a prompt that is hashed


def prefix_key(document: Mapping[str, Any]) -> bytes:
    """Return a hash of the beginning of the prompt in a request's JSON object; b"" if it has no
    prompt.
    """
    beginning = _beginning(document)
    return (
        hashlib.blake2b(
            beginning[:PREFIX_CHARACTERS].encode("utf-8", "replace"), digest_size=8
        ).digest()
        if beginning
        else b""
    )


def rank_replicas(key: bytes, names: Iterable[T]) -> list[T]:
    """Return the names of the replicas, the best for this key first."""

    def weight(name: T) -> bytes:
        """Return the hash of a name together with the key."""
        return hashlib.blake2b(key + str(name).encode(), digest_size=8).digest()

    return sorted(names, key=weight, reverse=True)


def _beginning(document: Mapping[str, Any]) -> str:
    """Return the text that the prompt begins with: the system text, or else the first message or
    the prompt itself. `document`: the request's JSON object.
    """
    messages = document.get("messages") or document.get("input")
    # Anthropic's and ollama's requests have the system text in `system`.
    if system := document.get("instructions") or cacheable_system(document.get("system")):
        return _text(system)
    if isinstance(messages, list) and messages and isinstance(messages[0], dict):
        return _text(messages[0].get("content"))
    return _text(messages if messages is not None else document.get("prompt"))


def _text(content: Any) -> str:
    """Return a message's content as text; a list of parts is encoded as JSON."""
    if isinstance(content, str):
        return content
    return json.dumps(content) if content else ""
