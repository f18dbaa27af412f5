"""Format sizes, counts, durations and times as text."""

import math
import re
from datetime import UTC, datetime

SECONDS_OF_UNIT = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "": 1.0}
DURATION_PATTERN = re.compile(
    r"-?(\d{1,9}(\.\d{1,9})?|(\d{1,9}(\.\d{1,9})?(ms|s|m|h|d)){1,8})", re.ASCII
)
DURATION_PART_PATTERN = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|)", re.ASCII)


def format_size(nbytes: float) -> str:
    """Return a number of bytes in binary units: '93.8 MiB' for 98362432."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural with -s unless the number is 1: '1 turn', '2
    turns'.
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


def format_duration(seconds: float) -> str:
    """Return a duration as '99 s', or in minutes from 100 seconds on: '2 minutes'."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"


def format_current_time() -> str:
    """Return the current time in UTC, such as '2026-11-22T08:15:00Z'."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_duration(value: object) -> float:
    """Return the seconds of a duration as ollama writes it: a number of seconds, or a text such as
    "30s", "5m" or "1h30m". A negative duration means forever, and is infinity. Raises ValueError for
    any other value.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("a duration is a number of seconds, or a text such as 5m")
    if not isinstance(value, str):
        try:
            seconds = float(value)
        except OverflowError:
            raise ValueError("the duration is too long; a negative one means forever") from None
    elif DURATION_PATTERN.fullmatch(value):
        sign = -1 if value.startswith("-") else 1
        parts = DURATION_PART_PATTERN.findall(value)
        seconds = sign * sum(float(number) * SECONDS_OF_UNIT[unit] for number, unit in parts)
    else:
        raise ValueError(f"{value[:40]!r} is no duration such as 300, 30s, 5m or 1h30m")
    if math.isnan(seconds):
        raise ValueError("a duration is a number of seconds")
    return math.inf if seconds < 0 else seconds
