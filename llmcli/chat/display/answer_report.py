"""An answer's accounts as the contract's JSON document and as one line for people.

`run --json` and the session log share the document. It computes nothing about speed itself: the
definitions are Answer's.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from llmcli.chat.display.styles import one_line
from llmcli.runtime.kv_size import KVCache
from llmcli.runtime.requests.request import Answer, percentile
from llmcli.runtime.runner import Runner
from llmcli.units import size

PERCENTILES = (0.50, 0.90, 0.95, 0.99)
NOTES = {
    "length": "stopped at the token limit",
    "cancelled": "cut",
    "context_full": "the context is full",
    "repetition": "stopped: it only repeats itself; --endless lets it",
}


def document(runner: Runner, name: str, file_bytes: int, answer: Answer) -> dict[str, Any]:
    """The document of `run --json`; what cannot be known is null, never a guess."""
    header, kv = runner.header, runner.kv_report()
    return {
        "model": {
            "name": name,
            "path": str(header.path),
            "file_bytes": file_bytes,
            "file_type": header.file_type,
            "parameters": header.parameters,
        },
        "text": answer.text,
        "finish": answer.finish,
        "tokens": _tokens(runner, answer),
        "timing": _timing(runner.load_ms, answer),
        "kv": {
            "type_k": kv.type_k,
            "type_v": kv.type_v,
            "bytes_per_token": kv.bytes_per_token,
            "cells": kv.cells,
            "used_cells": kv.used_cells,
            "predicted_bytes": kv.predicted_bytes,
            "allocated_bytes": kv.allocated_bytes,
            "compute_bytes": kv.compute_bytes,
            "output_bytes": kv.output_bytes,
        },
        **({"overflow": asdict(answer.left)} if answer.left.times else {}),
        **({"reproducible": True} if runner.options.reproducible else {}),
        **({"profile": runner.options.profile} if runner.options.profile else {}),
        **(
            {"beams": [{"text": one.text, "score": one.score} for one in answer.beams]}
            if answer.beams
            else {}
        ),
        "seed": answer.seed,
    }


def samples(runner: Runner, answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Several answers to one prompt, each with the seed that says it again."""
    return [
        {"text": a.text, "tokens": _tokens(runner, a), "finish": a.finish, "seed": a.seed}
        for a in answers
    ]


def _tokens(runner: Runner, answer: Answer) -> list[dict[str, Any]]:
    guided = any(token.constraint_ms for token in answer.tokens)
    rows: list[dict[str, Any]] = [
        {
            "id": t.id,
            "text": t.text,
            "ms": t.ms,
            "decode_ms": t.decode_ms,
            "sample_ms": t.sample_ms,
            "logprob": t.logprob,
            **({"constraint_ms": t.constraint_ms, "forced": t.forced} if guided else {}),
        }
        for t in answer.tokens
    ]
    for row, likeliest in zip(rows, answer.top, strict=False):
        row["top_logprobs"] = [
            {"id": one.token, "text": spelled(runner, one.token), "logprob": one.logprob}
            for one in likeliest
        ]
    return rows


def spelled(runner: Runner, token: int) -> str:
    """A token by itself, as text; ends and the like by their names, part of a character as U+FFFD."""
    return runner.model.piece(token, special=True).decode("utf-8", "replace")


def _timing(load_ms: float, answer: Answer) -> dict[str, Any]:
    spread = gaps(answer)
    itl = {f"p{share * 100:.0f}": percentile(spread, share) for share in PERCENTILES}
    guessed = (
        {}
        if answer.drafted is None
        else {"drafted_tokens": answer.drafted, "accepted_tokens": answer.accepted}
    )
    return {
        "load_ms": load_ms,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "prompt_ms": answer.prompt_ms,
        "prompt_per_second": answer.prompt_per_second,
        "ttft_ms": answer.ttft_ms,
        "generated_tokens": len(answer.tokens),
        "generate_ms": answer.generate_ms,
        "tokens_per_second": answer.tokens_per_second,
        "tpot_ms": answer.tpot_ms,
        "itl_ms": {**itl, "max": max(spread, default=0.0)},
        **guessed,
    }


def beam_lines(answer: Answer) -> list[str]:
    """What a beam search found, a line each, best first; nothing for other answers."""
    return [
        f"beam {number}  {one.score:.4f}  {one_line(one.text)}"
        for number, one in enumerate(answer.beams, 1)
    ]


def gaps(answer: Answer) -> list[float]:
    """Milliseconds between consecutive tokens."""
    return [token.ms for token in answer.tokens[1:]]


def used_bytes(cache: KVCache, used: int) -> int:
    """Bytes of the cells in use; a windowed layer never holds more than its window."""
    return sum(
        min(used, layer.cells) * (layer.k_bytes + layer.v_bytes) // layer.cells
        for layer in cache.layers
    )


def timing_line(runner: Runner, answer: Answer) -> str:
    """`[ttft 41 ms · prefill 12 tok 298 tok/s (+61 reused) · 45 tok 104.2 tok/s · p50 9.4 p99 12.1
    ms · KV …]`.
    """
    spread = gaps(answer)
    parts = [
        f"ttft {answer.ttft_ms:.0f} ms",
        _prefill(answer),
        f"{len(answer.tokens)} tok {answer.tokens_per_second:.1f} tok/s",
        f"p50 {percentile(spread, 0.5):.1f} p99 {percentile(spread, 0.99):.1f} ms",
        *_grammar(answer),
        *(
            [f"{answer.accepted} of {answer.drafted} guessed tokens right"]
            if answer.drafted
            else []
        ),
        _cells(runner),
    ]
    return f"[{' · '.join(parts)}]" + (
        f" ({NOTES[answer.finish]})" if answer.finish in NOTES else ""
    )


def told(runner: Runner, answer: Answer, timing: str) -> list[str]:
    """What is said of an answer's time, as `/set timing` has it."""
    if timing == "off":
        return []
    each = [" ".join(f"{one_line(token.text)}|{token.ms:.1f}" for token in answer.tokens)]
    return [*(each if timing == "tokens" and answer.tokens else ()), timing_line(runner, answer)]


def samples_line(runner: Runner, answers: Sequence[Answer]) -> str:
    """`[4 samples · ttft 41 ms · prefill 12 tok 298 tok/s (+0 reused) · 180 tok 61.2 tok/s together
    · KV …]`.
    """
    first = answers[0]
    ends = [answer.ttft_ms + answer.generate_ms for answer in answers]
    after = sum(max(0, len(answer.tokens) - 1) for answer in answers)
    spent = (max(ends) - min(answer.ttft_ms for answer in answers)) / 1000
    parts = [
        f"{len(answers)} samples",
        f"ttft {first.ttft_ms:.0f} ms",
        _prefill(first),
        f"{sum(len(answer.tokens) for answer in answers)} tok {after / spent if spent else 0:.1f} tok/s together",
        _cells(runner),
    ]
    full = sum(answer.finish == "context_full" for answer in answers)
    return f"[{' · '.join(parts)}]" + (f" ({full} cut: the context is full)" if full else "")


def _grammar(answer: Answer) -> list[str]:
    """The grammar's bill: how many tokens it left no choice for, and its time a token."""
    spent = sum(token.constraint_ms for token in answer.tokens)
    if not spent:
        return []
    forced = sum(token.forced for token in answer.tokens)
    return [f"{forced} tok forced, grammar {spent / len(answer.tokens):.2f} ms/tok"]


def _prefill(answer: Answer) -> str:
    fresh = answer.prompt_tokens - answer.cached_tokens
    return (
        f"prefill {fresh} tok {answer.prompt_per_second:.0f} tok/s (+{answer.cached_tokens} reused)"
    )


def _cells(runner: Runner) -> str:
    kv = runner.kv_report()
    cache = runner.predict(kv.type_k, kv.type_v)
    used = f"KV {kv.used_cells}/{kv.cells} cells"
    return (
        f"{used} {size(used_bytes(cache, kv.used_cells))} of {size(cache.nbytes)}"
        if cache
        else used
    )
