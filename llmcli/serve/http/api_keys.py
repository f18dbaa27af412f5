"""Checks the API key of a request, and identifies its client. If the server needs no keys, a client
is identified by its address.
"""

import hashlib
import hmac
from collections.abc import Mapping

from starlette.requests import HTTPConnection


def read_key(headers: Mapping[str, str]) -> str:
    """Return the API key in a request's headers: `Authorization: Bearer KEY` (OpenAI) or
    `x-api-key: KEY` (Anthropic); "" if there is none.
    """
    kind, _, value = headers.get("authorization", "").partition(" ")
    return value.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")


def is_allowed(headers: Mapping[str, str], keys: tuple[str, ...]) -> bool:
    """Return whether a request has one of the keys, or whether the server needs no key. Keys are
    compared in constant time, so that response times tell nothing about them.
    """
    key_of_request = read_key(headers).encode()
    matches = [hmac.compare_digest(key_of_request, key.encode()) for key in keys]
    return not keys or any(matches)


def client_id(headers: Mapping[str, str], address: str, keys: tuple[str, ...]) -> str:
    """Return the id of the client: its key, or its address if the server needs no keys. The engine
    uses it for fair scheduling and for private prefixes in the cache.
    """
    return read_key(headers) if keys else address


def connected_client(connection: HTTPConnection, keys: tuple[str, ...]) -> str:
    """Return the id of the client of a request or a WebSocket; see client_id()."""
    address = connection.client.host if connection.client else ""
    return client_id(connection.headers, address, keys)


def owner_id(headers: Mapping[str, str], keys: tuple[str, ...]) -> str:
    """Return the id of the client to which a stored file belongs: a hash of its key, because the key
    itself must not be stored; "" if the server needs no keys.
    """
    return hashlib.sha256(read_key(headers).encode()).hexdigest()[:32] if keys else ""
