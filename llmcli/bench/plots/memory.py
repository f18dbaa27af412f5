"""Charts of memory plans. For each device, a bar shows what uses the memory (weights, KV cache,
buffers), and how much stays free.
"""

from collections.abc import Callable, Sequence

from llmcli.charts.chart import Axis, ChartRow, NamedValue, ReferenceLine, RowChart
from llmcli.planning.dry_runs.memory_plan import DeviceMemory, MemoryPlan
from llmcli.runtime.binding.placement.devices import HOST_DEVICE
from llmcli.units import format_size

MIB_BYTES = 2**20
MEMORY_PARTS: tuple[tuple[str, Callable[[DeviceMemory], int | None]], ...] = (
    ("weights", lambda share: share.weights),
    ("weights in another layout", lambda share: share.repacked),
    ("KV cache", lambda share: share.kv),
    ("compute buffers", lambda share: share.compute),
    ("output buffer", lambda share: share.output),
)
OVERHEAD_LABEL, FREE_LABEL = "interpreter, libraries", "free"
MAX_FREE_RATIO = 2  # free memory is only drawn if it is at most this many times the used memory


def build_chart(plans: Sequence[tuple[str, MemoryPlan]]) -> RowChart | None:
    """Build a chart with one bar for each context and device. `plans`: the name and the memory plan
    of each context. Returns None if no size is known.
    """
    has_several_devices = any(len(plan.devices) > 1 for _, plan in plans)
    rows = [
        _row(f"{name}, {share.device}" if has_several_devices else name, share, plan.overhead)
        for name, plan in plans
        for share in plan.devices
    ]
    rows = [row for row in rows if row.values]
    if not rows:
        return None
    description = f"{_verdict(plans)} What llama.cpp maps and allocates, from its dry run."
    return RowChart("Memory", description, Axis("MiB"), tuple(rows))


def build_type_chart(
    rows: Sequence[tuple[str, int, str]], available: int | None
) -> RowChart | None:
    """Build a chart with one bar for each tensor type to which a model could be quantized: the
    bytes that llama.cpp would map and allocate. Returns None if there are no rows.

    `rows`: for each type, its name, the bytes and a note. `available`: free memory in bytes, None:
    unknown.
    """
    if not rows:
        return None
    bars = tuple(
        ChartRow(name, (NamedValue("MiB", nbytes / MIB_BYTES),), f"{format_size(nbytes)}, {word}")
        for name, nbytes, word in rows
    )
    is_near = available is not None and available <= MAX_FREE_RATIO * max(
        nbytes for _, nbytes, _ in rows
    )
    rules = (
        (ReferenceLine(available / MIB_BYTES, f"available: {format_size(available)}"),)
        if available is not None and is_near
        else ()
    )
    available_text = "unknown memory" if available is None else format_size(available)
    return RowChart(
        "In other types",
        f"Everything that llama.cpp would hold; available: {available_text}.",
        Axis("MiB"),
        bars,
        reference_lines=rules,
    )


def _verdict(plans: Sequence[tuple[str, MemoryPlan]]) -> str:
    verdicts = {plan.fits for _, plan in plans}
    if False in verdicts:
        return "Not all of it fits." if len(verdicts) > 1 else "It does not fit."
    return "Whether it fits is not known." if None in verdicts else "It fits."


def _row(name: str, share: DeviceMemory, overhead: int | None) -> ChartRow:
    """Build the bar of one device. Parts of unknown size are not drawn, but named in the bar's
    note.

    `overhead`: bytes of the process without the model; None: do not draw them.
    """
    parts = [(label, read_part(share)) for label, read_part in MEMORY_PARTS]
    if share.device == HOST_DEVICE and overhead is not None:
        parts.append((OVERHEAD_LABEL, overhead))
    unknown_labels = [label for label, value in parts if value is None]
    used = sum(value for _, value in parts if value)
    free = share.free_after
    if free is not None and 0 < free <= MAX_FREE_RATIO * used:
        parts.append((FREE_LABEL, free))
    note = (
        f"{format_size(used)}, "
        + _format_free(free)
        + (f" ({', '.join(unknown_labels)}: unknown)" if unknown_labels else "")
    )
    return ChartRow(
        name, tuple(NamedValue(label, value / MIB_BYTES) for label, value in parts if value), note
    )


def _format_free(free_bytes: int | None) -> str:
    if free_bytes is None:
        return "free memory unknown"
    return (
        f"{format_size(free_bytes)} free"
        if free_bytes >= 0
        else f"{format_size(-free_bytes)} too much"
    )
