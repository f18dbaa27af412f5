"""Comparison of two records of the command line (json_documents.py), and the values that may
differ.

A masked value may differ, but must have the same JSON type. Both records must have the same keys,
except for the keys that exist only if a measurement decides so.
"""

import re
from typing import Any

# Random identifiers, folders named by the hash of a path, times in the names of sessions.
VARIABLE_TEXT = re.compile(r"[0-9a-f]{12,}|\d{8}T\d{6}-\d+")
VARIABLE_TEXT_KEYS = {
    "id", "call_id", "item_id", "request_id", "response_id", "tool_use_id", "path", "name",
}  # fmt: skip
MASKED_KEYS = re.compile(
    # Times and rates.
    r"(_ms|_ns|_ts|_ts_each|_seconds|_per_second|_duration|_throughput)$"
    r"|^(ms|seconds|time|date|created|created_at|completed_at|modified_at|test_time|duration)$"
    # Free memory, and the memory of the interpreter.
    r"|^(available_bytes|overhead_bytes|process_bytes|free_bytes|max_parallel)$"
    # Versions and the machine.
    r"|^(versions|world|build|build_commit|build_info)$"
    # Text for people.
    r"|^(message|hint|verdict|why|note|notes|warnings|definitions)$"
    # The process.
    r"|^(pid|port|grpc_port)$"
)
# Only in these entries: values that depend on a measured speed, on free memory or on the time.
MEASURED = r"^bench |^home: state/profiles"
MASKED_PLACES = tuple(
    (re.compile(entry), re.compile(path))
    for entry, path in (
        (MEASURED, r"\.(pairs|rounds|differs|noisy|settled|faster|saturated|n_ubatch)$"),
        (MEASURED, r"\.(batch_leaving_memory_bound|roofline_fraction|tried|best|flags|settings)$"),
        (r"^bench tune", r"^\.measured_tokens$"),
        (r"verified\.gguf|^pareto ", r"(^|\.)speed$"),
        (r"^pareto .*--seconds 0\.2", r"\.dominated_by$"),
        (r"-o verified\.gguf", r"^\.(sha256|bytes)$"),
        (r"^show verified\.gguf", r"^\.bytes$"),
        # The name of the built-in text.
        (r"verified|^pareto ", r"(^|\.)answers\.text$"),
        (r"^eval ", r"^\.text$"),
        (r" -md |--ngram-draft on|^bench spec", r"\.(drafted|accepted)_tokens$"),
        (r" -md |--ngram-draft on", r"\.(tokens_per_pass|drafts)$"),
        (r"^bench spec", r"\.(drafts|bound_guesses)$"),
        # The output buffer grows with the longest pass, and measured times decide how long it is.
        (r" -md |--ngram-draft on|--grammar| -jf? |^serve: kv$", r"\.output_bytes$"),
        (r"^sessions", r"\.bytes$"),
        (r"^doctor", r"^\.cpu\.load$|^\.folders\[\]\.(bytes|files)$"),
        (r"^plan ", r"\.max_ctx\.\w+$"),
    )
)
# Keys that exist only if a measurement decides so.
OPTIONAL_KEYS = tuple(
    (re.compile(entry), re.compile(path))
    for entry, path in (
        (r" -md |--ngram-draft on", r"^\.timing\.(drafted|accepted)_tokens$"),
        (r" -md |--ngram-draft on", r"^\.timing\.(tokens_per_pass|drafts)"),
        (r"bench tune|^home: state/profiles", r"\.settings\.\w+$"),
    )
)


def differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Return a line of text for each difference between two records."""
    lines = [f"only in the first: {name}" for name in first if name not in second]
    lines += [f"only in the second: {name}" for name in second if name not in first]
    for name in (name for name in first if name in second):
        a, b = first[name], second[name]
        for field in ("exit", "has_error", "has_hint", "has_traceback"):
            if a.get(field) != b.get(field):
                lines.append(f"{name}: {field}: {a.get(field)!r}, then {b.get(field)!r}")
        for key in sorted({*a["keys"]} ^ {*b["keys"]}):
            if not any(e.search(name) and path.search(key) for e, path in OPTIONAL_KEYS):
                side = "first" if key in a["keys"] else "second"
                lines.append(f"{name}: only the {side} has {key}")
        lines += compare_values(name, "", a["document"], b["document"])
    return lines


def compare_values(entry: str, path: str, first: Any, second: Any) -> list[str]:
    """Return a line of text for each difference between two JSON values that is not masked.
    `entry`: name of the command. `path`: keys that lead to the value, such as ".timing.ms".
    """
    line = f"{entry}: {path}: {shortened(first)}, then {shortened(second)}"
    if is_measured(entry, path):
        return []
    if type(first) is not type(second):
        return [line]
    if is_masked(entry, path, first):
        return []
    if isinstance(first, dict):
        return [
            line
            for key in first
            if key in second
            for line in compare_values(entry, f"{path}.{key}", first[key], second[key])
        ]
    if isinstance(first, list):
        if len(first) != len(second):
            return [f"{line}: {len(first)} items, then {len(second)}"]
        return [
            line
            for a, b in zip(first, second, strict=True)
            for line in compare_values(entry, f"{path}[]", a, b)
        ]
    return (
        []
        if without_random_part(entry, path, first) == without_random_part(entry, path, second)
        else [line]
    )


def is_measured(entry: str, path: str) -> bool:
    """Return whether a value depends on a measurement, so that even its type may differ."""
    return any(place.search(path) and name.search(entry) for name, place in MASKED_PLACES)


def is_masked(entry: str, path: str, value: Any) -> bool:
    """Return whether a value may differ, because of its key or because it is a measured number."""
    key = path.rpartition(".")[2].removesuffix("[]")
    if isinstance(value, str) and key == "error":  # a message for people, not a standard error
        return True
    if isinstance(value, float) and re.search(MEASURED, entry):
        return True
    return bool(MASKED_KEYS.search(key))


def without_random_part(entry: str, path: str, value: Any) -> Any:
    """Return a value in the form that is compared: without random identifiers and times where its
    key may contain them, and SQL without line breaks.
    """
    key = path.rpartition(".")[2].removesuffix("[]")
    if isinstance(value, str) and entry.endswith(".sqlite"):
        return " ".join(value.split())
    if isinstance(value, str) and key in VARIABLE_TEXT_KEYS:
        return VARIABLE_TEXT.sub("*", value)
    return value


def shortened(value: Any) -> str:
    """Return the repr of a value, cut to 200 characters."""
    text = repr(value)
    return text if len(text) < 200 else f"{text[:200]}..."
