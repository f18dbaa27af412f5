"""Identifies clients: by the key of a request, as OpenAI's clients send it, or by address if the
server needs no keys.
"""

import hmac
from collections.abc import Mapping


def read_key(headers: Mapping[str, str]) -> str:
    """Return the key of a request, or ""."""
    kind, _, value = headers.get("authorization", "").partition(" ")
    return value.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")


def is_allowed(headers: Mapping[str, str], keys: tuple[str, ...]) -> bool:
    """Return whether a request has one of the keys, or none is needed. All keys are compared, each
    in constant time.
    """
    key_of_request = read_key(headers).encode()
    matches = [hmac.compare_digest(key_of_request, key.encode()) for key in keys]
    return not keys or any(matches)


def client_id(headers: Mapping[str, str], address: str, keys: tuple[str, ...]) -> str:
    """Return the client that a request counts for: its key, else its address."""
    return read_key(headers) if keys else address
