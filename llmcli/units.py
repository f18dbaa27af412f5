"""Numbers as people read them; a leaf that every room may import."""


def size(nbytes: float) -> str:
    """Bytes in binary units: 98362432 -> '93.8 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def several(number: int, noun: str) -> str:
    """A number of things: '1 turn', '2 turns'."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
