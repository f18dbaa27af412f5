"""Who asks: by the key of a request, as OpenAI's clients send it, or by its address where no key is
needed.
"""

import hmac
from collections.abc import Mapping


def brought(headers: Mapping[str, str]) -> str:
    """The key that a request carries; "" for none."""
    kind, _, given = headers.get("authorization", "").partition(" ")
    return given.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")


def allowed(headers: Mapping[str, str], keys: tuple[str, ...]) -> bool:
    """Whether a request carries one of the keys, or none is needed; all are compared, each in
    constant time.
    """
    given = brought(headers).encode()
    found = [hmac.compare_digest(given, key.encode()) for key in keys]
    return not keys or any(found)


def client(headers: Mapping[str, str], address: str, keys: tuple[str, ...]) -> str:
    """The client that a request counts for: its key, else its address."""
    return brought(headers) if keys else address
