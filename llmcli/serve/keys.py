"""Who asks: the key that a request brings, as OpenAI's clients bring theirs, or the address where none is needed."""

import hmac
from collections.abc import Mapping


def brought(headers: Mapping[str, str]) -> str:
    """The key of a request; "" where there is none."""
    kind, _, given = headers.get("authorization", "").partition(" ")
    return given.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")


def allowed(headers: Mapping[str, str], keys: tuple[str, ...]) -> bool:
    """Whether one of the keys is there; every key is compared, in constant time."""
    given = brought(headers).encode()
    found = [hmac.compare_digest(given, key.encode()) for key in keys]
    return not keys or any(found)


def client(headers: Mapping[str, str], address: str, keys: tuple[str, ...]) -> str:
    """Whose a request is, for a fair share: its key's, else its address's."""
    return brought(headers) if keys else address
