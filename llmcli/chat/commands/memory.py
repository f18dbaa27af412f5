"""/kv and /timing: where the bytes are and where the milliseconds went."""

from llmcli.chat import report
from llmcli.chat.commands.base import Command
from llmcli.chat.render import bar, token_rows
from llmcli.chat.talk import Talk
from llmcli.errors import UserError
from llmcli.runtime.request import percentile
from llmcli.units import size

COMPARED = ("f16", "q8_0", "q4_0")


def show_kv(talk: Talk, rest: str) -> None:
    """Show the KV cache: bytes predicted and allocated, cells in use, and other types."""
    runner, kv = talk.runner, talk.runner.kv_report()
    system = min(talk.prefix(), kv.used_cells)
    turns, free = kv.used_cells - system, kv.cells - kv.used_cells
    share = bar([("S", system), ("T", turns)], kv.cells)
    rows = [
        ("predicted", _bytes(kv.predicted_bytes)), ("allocated", _bytes(kv.allocated_bytes)),
        ("difference", _difference(kv.predicted_bytes, kv.allocated_bytes)),
        ("type", f"K {kv.type_k}, V {kv.type_v}"), ("bytes per token", _bytes(kv.bytes_per_token)),
        ("cells", f"{kv.cells}: system {system}, turns {turns}, free {free}"), ("", f"[{share.ljust(40, '.')}]"),
    ]  # fmt: skip
    talk.ui.table(("KV cache", ""), rows)
    others = [(kind, runner.predict(kind, kind)) for kind in COMPARED]
    table = [(k, f"{c.bytes_per_token:,}", f"{c.nbytes:,}", size(c.nbytes)) for k, c in others if c]
    if table:
        talk.ui.table(("as type", "bytes/token", "bytes", "size"), table, right=("bytes/token", "bytes", "size"))


def show_timing(talk: Talk, rest: str) -> None:
    """Show the last answer token by token: milliseconds, and what they were spent on."""
    if talk.last is None:
        raise UserError("there is no answer yet", hint="ask something first")
    columns = ("#", "token", "ms", "decode", "sample", "rest", "█ decode ▒ sample ░ rest")
    talk.ui.table(columns, token_rows(talk.last.tokens), right=("#", "ms", "decode", "sample", "rest"))
    gaps = report.gaps(talk.last)
    shares = " · ".join(f"p{share * 100:.0f} {percentile(gaps, share):.2f}" for share in report.PERCENTILES)
    talk.ui.text(f"between tokens: {shares} · max {max(gaps, default=0.0):.2f} ms")
    talk.ui.text(report.timing_line(talk.runner, talk.last))


def _bytes(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,} ({size(number)})"


def _difference(predicted: int | None, allocated: int | None) -> str:
    return "unknown" if predicted is None or allocated is None else f"{allocated - predicted:,}"


COMMANDS = (
    Command("kv", show_kv),
    Command("timing", show_timing),
)
