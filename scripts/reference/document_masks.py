"""What may differ between two records of the command line, and what does.

A masked value must still be of the same kind: a number, a text, true or false, or null. Keys are never masked.
"""

import re
from typing import Any

# Identifiers, and folders that are named by the hash of a path.
RANDOM_HEX = re.compile(r"[0-9a-f]{12,}")
IDENTIFIER_KEYS = {"id", "call_id", "item_id", "request_id", "response_id", "path", "tool_use_id"}
TIME_KEYS = re.compile(
    r"(_ms|_ns|_ts|_ts_each|_seconds|_per_second|_duration|_throughput)$"
    r"|^(ms|seconds|time|date|created|created_at|completed_at|modified_at|test_time|duration)$"
)
MEMORY_KEYS = re.compile(
    r"^(available_bytes|overhead_bytes|process_bytes|free_bytes|max_parallel|group_left_bytes)$"
)
VERSION_KEYS = re.compile(r"^(versions|world|build|build_commit|build_info|version)$")
TEXT_KEYS = re.compile(
    r"^(message|messages|hint|verdict|why|what|note|notes|warnings|definitions)$"
)
PROCESS_KEYS = re.compile(r"^(pid|port|grpc_port)$")
KEYS = (TIME_KEYS, MEMORY_KEYS, VERSION_KEYS, TEXT_KEYS, PROCESS_KEYS)

# (entries, paths): what depends on a measured speed or a moment, in these entries alone.
PLACES: tuple[tuple[str, str], ...] = ()
MASKED_PLACES = tuple((re.compile(entry), re.compile(path)) for entry, path in PLACES)


def differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Return a line for each difference of two records."""
    found = [f"only in the first: {name}" for name in first.keys() - second.keys()]
    found += [f"only in the second: {name}" for name in second.keys() - first.keys()]
    for name in (name for name in first if name in second):
        a, b = first[name], second[name]
        for field in ("exit", "has_error", "has_hint", "has_traceback"):
            if a.get(field) != b.get(field):
                found.append(f"{name}: {field}: {a.get(field)!r}, then {b.get(field)!r}")
        found += [
            f"{name}: key only in the first: {key}" for key in a["keys"] if key not in b["keys"]
        ]
        found += [
            f"{name}: key only in the second: {key}" for key in b["keys"] if key not in a["keys"]
        ]
        found += compare_values(name, "", a["document"], b["document"])
    return found


def compare_values(entry: str, path: str, first: Any, second: Any) -> list[str]:
    """Return a line for each difference of two values that is not masked."""
    if is_masked(entry, path, first):
        return (
            [] if kind(first) == kind(second) else [f"{entry}: {path}: {first!r}, then {second!r}"]
        )
    if isinstance(first, dict) and isinstance(second, dict):
        common = [key for key in first if key in second]
        return [
            line
            for key in common
            for line in compare_values(entry, f"{path}.{key}", first[key], second[key])
        ]
    if isinstance(first, list) and isinstance(second, list):
        if len(first) != len(second):
            return [f"{entry}: {path}: {len(first)} items, then {len(second)}"]
        return [
            line
            for a, b in zip(first, second, strict=True)
            for line in compare_values(entry, f"{path}[]", a, b)
        ]
    if without_hashes(path, first) == without_hashes(path, second) and kind(first) == kind(second):
        return []
    return [f"{entry}: {path}: {first!r}, then {second!r}"]
