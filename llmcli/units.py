"""Numbers and times formatted for people and files."""

from datetime import UTC, datetime


def format_size(nbytes: float) -> str:
    """Format bytes in binary units: 98362432 -> '93.8 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def format_count(number: int, noun: str) -> str:
    """Format a count with its noun: '1 turn', '2 turns'."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def format_duration(seconds: float) -> str:
    """Format a duration as seconds, or as minutes from 100 seconds on."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"


def format_current_time() -> str:
    """Format the current time in UTC: 2026-11-22T08:15:00Z."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
