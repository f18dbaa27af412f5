"""Mutations of JSON texts: values of a wrong type, odd numbers, deep nesting, broken encodings.

`mutate_json` changes one value, key or byte of a JSON text. `mutate_lines` does so in one line of a
file with a JSON object on each line.
"""

import json
import random
from typing import Any

DEEP = 3000  # levels of nesting, more than Python's parser allows
ODD_VALUES: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    1.5,
    -0.0,
    2**31,
    2**53 + 1,
    2**63,
    2**64,
    10**30,
    1e308,
    "",
    "x",
    "0",
    "\x00",
    "a\x00b",
    "\x1b[2J\x9b1m\x7f",
    "\u202e\u2066right to left",
    "../../x",
    "/",
    "/dev/zero",
    "x" * 100_000,
    [],
    [0],
    [None],
    [[1, 2], [3]],
    [-1] * 1000,
    {},
    {"": ""},
    {"a": {"b": {"c": [1]}}},
]
# Literal texts in place of a value, which json.dumps does not write.
ODD_TEXTS = [
    "NaN",
    "-Infinity",
    "1e999",
    "9" * 5000,
    "-" + "1" * 400,
    "0." + "3" * 5000,
    "[" * DEEP + "]" * DEEP,
    '{"a":' * DEEP + "1" + "}" * DEEP,
    "[" * 100 + "]" * 100,
    '"\\ud800"',
    '"\\udce9.gguf"',
    '"' + "\\u0000" * 50 + '"',
    "[" + "[]," * 400_000 + "[]]",
    "",
]
MARK = "@@the value@@"


def mutate_json(raw: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Return a JSON text with one mutation, and a description of the mutation."""
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        return _mutate_bytes(raw, rng)
    choice = rng.random()
    if choice < 0.15:
        return _mutate_bytes(raw, rng)
    if choice < 0.2:
        return _encode_differently(raw, rng)
    places = list(_places(document))
    if not places:
        return json.dumps(rng.choice(ODD_VALUES)).encode(), "another document"
    parent, key = rng.choice(places)
    name = str(key)[:40]
    if choice < 0.35:
        parent[key] = MARK
        text = rng.choice(ODD_TEXTS)
        return json.dumps(document).replace(
            json.dumps(MARK), text
        ).encode(), f"{name} = {text[:20]}"
    if choice < 0.45:
        del parent[key]
        return json.dumps(document).encode(), f"without {name}"
    if choice < 0.5 and isinstance(parent, dict):
        parent[str(rng.choice(("", "x", "\x9b", "name", "path")))] = parent.pop(key)
        return json.dumps(document).encode(), f"{name} renamed"
    parent[key] = rng.choice([*ODD_VALUES, document])
    try:
        return json.dumps(document).encode(), f"{name} = {str(parent[key])[:30]!r}"
    except (ValueError, RecursionError):  # the document in itself
        parent[key] = None
        return json.dumps(document).encode(), f"{name} = None"


def mutate_lines(raw: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Return a file of JSON lines in which one line is mutated, removed, repeated or cut."""
    lines = raw.splitlines(keepends=True)
    if not lines:
        return mutate_json(raw, rng)
    number, choice = rng.randrange(len(lines)), rng.random()
    if choice < 0.08:
        del lines[number]
        return b"".join(lines), f"without line {number + 1}"
    if choice < 0.12:
        lines.insert(rng.randrange(len(lines) + 1), lines[number])
        return b"".join(lines), f"line {number + 1} repeated"
    if choice < 0.16:
        return b"".join(lines)[: rng.randrange(len(raw) + 1)], "cut"
    line, mutation = mutate_json(lines[number].rstrip(b"\n"), rng)
    lines[number] = line + b"\n"
    return b"".join(lines), f"line {number + 1}: {mutation}"


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return every place of a document as the container and the key or index of the value."""
    places, values = [], [value]
    while values:
        container = values.pop()
        keys = (
            list(container)
            if isinstance(container, dict)
            else range(len(container))
            if isinstance(container, list)
            else ()
        )
        for key in keys:
            places.append((container, key))
            values.append(container[key])
    return places


def _mutate_bytes(raw: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Return the text with a flipped bit, a cut, a repetition, or other bytes."""
    mutated, at = bytearray(raw), rng.randrange(max(1, len(raw)))
    kind = rng.randrange(6)
    if kind == 0 and raw:
        mutated[at] ^= 1 << rng.randrange(8)
        return bytes(mutated), f"bit of byte {at}"
    if kind == 1:
        return raw[:at], f"cut at {at}"
    if kind == 2:
        return raw[:at] + rng.randbytes(rng.choice((1, 4, 100))) + raw[at:], f"bytes at {at}"
    if kind == 3:
        return raw + raw, "twice"
    if kind == 4:
        return rng.choice((b"", b"\x00", b"\n", b"null", b"[]", b'"x"', b"\x00" * 5000)), "other"
    return raw[:at] + b"[" * 100_000, f"brackets at {at}"


def _encode_differently(raw: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Return the text in another encoding, with a byte-order mark, or with Windows line ends."""
    codec = rng.choice(("utf-8-sig", "utf-16", "utf-32", "crlf"))
    if codec == "crlf":
        return raw.replace(b"\n", b"\r\n"), codec
    return raw.decode("utf-8", "replace").encode(codec), codec
