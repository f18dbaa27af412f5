"""Identifies clients: by the API key of a request, as OpenAI's clients send it, or by the address
if the server needs no keys.
"""

import hmac
from collections.abc import Mapping


def read_key(headers: Mapping[str, str]) -> str:
    """Return the API key of a request, or "" if it has none."""
    kind, _, value = headers.get("authorization", "").partition(" ")
    return value.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")


def is_allowed(headers: Mapping[str, str], keys: tuple[str, ...]) -> bool:
    """Return whether a request has one of the keys, or whether the server needs no key. The key is
    compared with all keys in constant time.
    """
    key_of_request = read_key(headers).encode()
    matches = [hmac.compare_digest(key_of_request, key.encode()) for key in keys]
    return not keys or any(matches)


def client_id(headers: Mapping[str, str], address: str, keys: tuple[str, ...]) -> str:
    """Return the id of the client, for fair scheduling and for private prefixes in the cache: its
    key, or its address if the server needs no keys.
    """
    return read_key(headers) if keys else address
