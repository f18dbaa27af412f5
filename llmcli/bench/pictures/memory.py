"""The receipt of `plan` as bars: what a run holds in memory, part by part, and what stays free."""

from collections.abc import Sequence

from llmcli.bench.charts.chart import Axis, Row, Rows, Rule, Value
from llmcli.hardware.plan import Receipt, Share
from llmcli.runtime.binding.devices import HOST
from llmcli.units import size

MIB = 2**20
PARTS = (
    ("weights", "weights"),
    ("weights in another layout", "repacked"),
    ("KV cache", "kv"),
    ("compute buffers", "compute"),
    ("output buffer", "output"),
)
OVERHEAD, FREE = "interpreter, libraries", "free"
LARGE = 2  # free memory is drawn where it is no more than so many times what is used


def chart(receipts: Sequence[tuple[str, Receipt]]) -> Rows | None:
    """A bar for each context and device; None where nothing of it is known."""
    several = any(len(receipt.shares) > 1 for _, receipt in receipts)
    rows = [
        _row(f"{name}, {share.device}" if several else name, share, receipt.overhead)
        for name, receipt in receipts
        for share in receipt.shares
    ]
    rows = [row for row in rows if row.values]
    if not rows:
        return None
    says = f"{_verdict(receipts)} What llama.cpp maps and allocates, as its dry run tells."
    return Rows("Memory", says, Axis("MiB"), tuple(rows))


def types(rows: Sequence[tuple[str, int, str]], available: int | None) -> Rows | None:
    """What llama.cpp would map and allocate for each type of the weights: name, bytes, and a word
    about it.
    """
    if not rows:
        return None
    bars = tuple(
        Row(name, (Value("MiB", nbytes / MIB),), f"{size(nbytes)}, {word}")
        for name, nbytes, word in rows
    )
    near = available is not None and available <= LARGE * max(nbytes for _, nbytes, _ in rows)
    rules = (
        (Rule(available / MIB, f"available: {size(available)}"),)
        if available is not None and near
        else ()
    )
    room = "unknown memory is" if available is None else f"{size(available)} are"
    return Rows(
        "In other types",
        f"All that llama.cpp would hold; {room} available.",
        Axis("MiB"),
        bars,
        rules=rules,
    )


def _verdict(receipts: Sequence[tuple[str, Receipt]]) -> str:
    verdicts = {receipt.fits for _, receipt in receipts}
    if False in verdicts:
        return "Not all of it fits." if len(verdicts) > 1 else "It does not fit."
    return "Whether it fits is not known." if None in verdicts else "It fits."


def _row(name: str, share: Share, overhead: int | None) -> Row:
    """One device's parts; what is not known is left out, and said. `overhead` None: it is no part
    of this picture.
    """
    held = [(label, getattr(share, part)) for label, part in PARTS]
    if share.device == HOST and overhead is not None:
        held.append((OVERHEAD, overhead))
    lacks = [label for label, value in held if value is None]
    used = sum(value for _, value in held if value)
    left = share.left
    if left is not None and 0 < left <= LARGE * used:
        held.append((FREE, left))
    note = f"{size(used)}, " + _left(left) + (f" ({', '.join(lacks)}: unknown)" if lacks else "")
    return Row(name, tuple(Value(label, value / MIB) for label, value in held if value), note)


def _left(left: int | None) -> str:
    if left is None:
        return "free memory unknown"
    return f"{size(left)} free" if left >= 0 else f"{size(-left)} too much"
