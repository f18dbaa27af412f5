"""Turns what a server returned for a call into a bounded text.

A result is untrusted: nothing in it may act on a terminal, and it may have any JSON in any field.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from llmcli.ui import escape_controls
from llmcli.units import format_count

# escape sequences of terminals: CSI, OSC and those of two characters
ESCAPE_SEQUENCES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)|[@-Z\\-_])"
)
MAX_BLOCKS = 1000


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call. `n_left_out`: bytes of the text that are not in it, because it was too
    long. `is_error`: the call failed, or was not made; the text says why.
    """

    text: str
    is_error: bool = False
    n_left_out: int = 0


def read_result(result: Any, max_bytes: int) -> ToolResult:
    """Return the result in the answer to `tools/call`, with at most `max_bytes` bytes of text."""
    if not isinstance(result, dict):
        return ToolResult("the server's result is not an object", is_error=True)
    content = result.get("content")
    blocks = content if isinstance(content, list) else []
    texts = [_read_block(block) for block in blocks[:MAX_BLOCKS]]
    if len(blocks) > MAX_BLOCKS:
        texts.append(f"[{format_count(len(blocks) - MAX_BLOCKS, 'further block')} left out]")
    if not blocks and result.get("structuredContent") is not None:
        texts = [_dump(result["structuredContent"])]
    return bound_text("\n".join(texts), max_bytes, is_error=result.get("isError") is True)


def bound_text(text: str, max_bytes: int, *, is_error: bool = False) -> ToolResult:
    """Return a text without control characters as a result. If it is too long, its end is left out,
    and a last line says so.
    """
    clean = clean_text(text)
    raw = clean.encode()
    if len(raw) <= max_bytes:
        return ToolResult(clean, is_error)
    kept = raw[:max_bytes].decode("utf-8", "ignore")
    n_left_out = len(raw) - len(kept.encode())
    return ToolResult(
        f"{kept}\n[{n_left_out:,} of {len(raw):,} bytes left out]", is_error, n_left_out
    )


def clean_text(text: str) -> str:
    """Return a text from a server without escape sequences, with visible characters in place of
    other control characters, and with U+FFFD in place of half surrogate pairs.
    """
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    text = ESCAPE_SEQUENCES.sub("", text.replace("\r\n", "\n"))
    return escape_controls(text)


def _read_block(block: Any) -> str:
    """Return a block of content as text. Everything that is not text becomes a line about it."""
    if not isinstance(block, dict):
        return "[something that is no block of content]"
    kind = block.get("type")
    if kind == "text" and isinstance(block.get("text"), str):
        return str(block["text"])
    if kind == "resource" and isinstance(block.get("resource"), dict):
        resource = block["resource"]
        if isinstance(resource.get("text"), str):
            return str(resource["text"])
        return f"[resource {str(resource.get('uri'))[:200]} is not text]"
    if kind == "resource_link":
        return f"[resource {str(block.get('uri'))[:200]}]"
    if kind in ("image", "audio"):
        size = len(block["data"]) * 3 // 4 if isinstance(block.get("data"), str) else 0
        return f"[{kind} of {size:,} bytes left out: this model reads text]"
    return f"[content of type {str(kind)[:40]} left out]"


def _dump(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        return "[structured content that is nested too deeply]"
