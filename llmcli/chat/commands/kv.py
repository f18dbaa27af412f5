"""/kv: shows the size and the use of the KV cache."""

from collections.abc import Sequence

from llmcli.chat.cache_map import cache_segments, draw_cache
from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands.base import ReplCommand
from llmcli.errors import UserError
from llmcli.runtime.runner import Runner
from llmcli.units import format_size

COMPARED_TYPES = ("f32", "f16", "q8_0", "q5_1", "q4_0")
MAX_LISTED_CHECKPOINTS = 8
MAX_CONTEXT_TOKENS = 1 << 24  # longest context length that the command accepts


def show_kv(chat: ChatSession, argument: str) -> None:
    """Show the KV cache: bytes, cells by owner, and sizes for other types and lengths.

    The owner of a cell is what its token belongs to: the system text, a turn, or another sequence.
    `/kv 8192 32768` shows the sizes for these context lengths.
    """
    runner, kv = chat.runner, chat.runner.kv_report()
    lengths = _parse_lengths(argument) or (kv.cells // 2, kv.cells, 2 * kv.cells)
    segments = cache_segments(chat)
    rows = [
        ("predicted", _format_bytes(kv.predicted_bytes)),
        ("allocated", _format_bytes(kv.allocated_bytes)),
        ("difference", _format_difference(kv.predicted_bytes, kv.allocated_bytes)),
        ("compute buffer", _format_bytes(kv.compute_bytes)),
        ("output buffer", _format_bytes(kv.output_bytes)),
        ("type", f"K {kv.type_k}, V {kv.type_v}"),
        ("bytes per token", _format_bytes(kv.bytes_per_token)),
        (
            "cells",
            f"{kv.cells}: {', '.join(f'{segment.name} {segment.cells}' for segment in segments)}",
        ),
        (
            "shared",
            f"{sum(segment.shared for segment in segments)} "
            "(used by several sequences, counted once)",
        ),
        ("", draw_cache(segments)),
    ]
    if runner.context.needs_checkpoints:
        rows.insert(-1, ("checkpoints", _describe_checkpoints(runner)))
    chat.ui.table(("KV cache", ""), rows)
    columns = ("as type", "bytes/token", *(f"{length:,} tokens" for length in lengths))
    table = [
        row for cache_type in COMPARED_TYPES if (row := _size_row(runner, cache_type, lengths))
    ]
    if table:
        chat.ui.table(columns, table, right=columns[1:])


def _size_row(runner: Runner, cache_type: str, lengths: Sequence[int]) -> tuple[str, ...] | None:
    """Return a table row with the predicted sizes of a KV cache of type `cache_type`, for each of
    the context lengths. Return None if the size cannot be predicted for this model.
    """
    caches = [runner.predict_cache(cache_type, cache_type, length) for length in lengths]
    if not caches[0]:
        return None
    return (
        cache_type,
        f"{caches[0].bytes_per_token:,}",
        *(format_size(cache.nbytes) for cache in caches if cache),
    )


def _describe_checkpoints(runner: Runner) -> str:
    """Return the number and bytes of the checkpoints, the budget of all states outside, and after
    how many tokens of their conversations the last ones are.
    """
    engine = runner.engine
    checkpoints, store = engine.ledger.checkpoints, engine.scheduler.offload_store
    lengths = sorted({checkpoint.length for checkpoint in checkpoints.in_slots})
    listed = ", ".join(map(str, lengths[-MAX_LISTED_CHECKPOINTS:]))
    omission = "…, " if len(lengths) > MAX_LISTED_CHECKPOINTS else ""
    return (
        f"{len(checkpoints)} with {_format_bytes(checkpoints.nbytes)} in host memory, "
        f"of {format_size(store.max_bytes)} for states"
        + (f"; at tokens {omission}{listed}" if listed else "")
    )


def _parse_lengths(argument: str) -> tuple[int, ...]:
    """Return the first six context lengths in the argument. Raises UserError if a word is not a
    number of tokens.
    """
    words = argument.replace(",", "").split()
    if not all(
        word.isascii() and word.isdigit() and 0 < int(word) <= MAX_CONTEXT_TOKENS for word in words
    ):
        raise UserError(
            f"/kv {argument}: not valid context lengths", hint="/kv 8192 32768 shows other lengths"
        )
    return tuple(int(word) for word in words[:6])


def _format_bytes(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,} ({format_size(number)})"


def _format_difference(predicted: int | None, allocated: int | None) -> str:
    return "unknown" if predicted is None or allocated is None else f"{allocated - predicted:,}"


COMMANDS = (ReplCommand("kv", show_kv, args="[TOKENS …]", group="inside the model"),)
