"""Formatting of result rows as JSON, JSON lines and CSV, as llama-bench does."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

OUTPUT_FORMATS = ("md", "csv", "json", "jsonl")


def format_json(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the rows as one JSON list."""
    return json.dumps(rows, indent=2, allow_nan=False)


def format_json_lines(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the rows as JSON, one row per line."""
    return "\n".join(json.dumps(row, allow_nan=False) for row in rows)


def format_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the rows as CSV. Every value is quoted, and booleans are 0 or 1. All rows must have
    the same fields.
    """
    out = io.StringIO()
    out.write(",".join(rows[0]) + "\n")
    writer = csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n")
    for row in rows:
        writer.writerow(int(value) if isinstance(value, bool) else value for value in row.values())
    return out.getvalue().rstrip("\n")
