"""Format sizes, counts, durations and times as text."""

from datetime import UTC, datetime


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
