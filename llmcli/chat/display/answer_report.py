"""Reports the figures of an answer: the JSON document of `run --json` and of the session log, and
the timing line that is printed below an answer.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from llmcli.chat.display.styles import escape_line
from llmcli.runtime.drafting.gain.pass_cost import PASS_ROWS
from llmcli.runtime.kv_size import KVCache
from llmcli.runtime.requests.draft_counts import DraftCounts
from llmcli.runtime.requests.request import Answer, percentile
from llmcli.runtime.runner import Runner
from llmcli.units import format_size

PERCENTILES = (0.50, 0.90, 0.95, 0.99)
# Notes on the reasons for which an answer ended early.
FINISH_NOTES = {
    "length": "stopped at the token limit",
    "cancelled": "stopped by the user",
    "context_full": "the context is full",
    "failed": "broken off",
    "repetition": "stopped because it repeated itself; --endless allows that",
}


def build_document(runner: Runner, name: str, file_bytes: int, answer: Answer) -> dict[str, Any]:
    """Return an answer as a JSON document: text, tokens, timing, model and KV cache. `name`: the
    model's name; `file_bytes`: size of its file. Unknown values are None.
    """
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
        "tokens": _token_records(runner, answer),
        "timing": _timing_record(runner, answer),
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
        **_draft_record(runner),
        **({"overflow": asdict(answer.overflow_stats)} if answer.overflow_stats.times else {}),
        **({"reproducible": True} if runner.options.reproducible else {}),
        **({"profile": runner.options.profile} if runner.options.profile else {}),
        **(
            {"beams": [{"text": beam.text, "score": beam.score} for beam in answer.beams]}
            if answer.beams
            else {}
        ),
        "seed": answer.seed,
    }


def build_sample_documents(runner: Runner, answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return the JSON documents of several answers to one prompt. They contain only what differs
    between the answers: text, tokens, finish reason and seed.
    """
    return [
        {
            "text": answer.text,
            "tokens": _token_records(runner, answer),
            "finish": answer.finish,
            "seed": answer.seed,
        }
        for answer in answers
    ]


def _token_records(runner: Runner, answer: Answer) -> list[dict[str, Any]]:
    """Return a JSON object for each token, with its times and, if they are known, the likeliest
    alternatives.
    """
    is_constrained = any(token.constraint_ms for token in answer.tokens)
    rows: list[dict[str, Any]] = [
        {
            "id": token.id,
            "text": token.text,
            "ms": token.ms,
            "decode_ms": token.decode_ms,
            "sample_ms": token.sample_ms,
            "logprob": token.logprob,
            **(
                {"constraint_ms": token.constraint_ms, "forced": token.forced}
                if is_constrained
                else {}
            ),
        }
        for token in answer.tokens
    ]
    for row, likeliest in zip(rows, answer.top_logprobs, strict=False):
        row["top_logprobs"] = [
            {
                "id": candidate.token,
                "text": token_text(runner, candidate.token),
                "logprob": candidate.logprob,
            }
            for candidate in likeliest
        ]
    return rows


def token_text(runner: Runner, token: int) -> str:
    """Return the text of a token id. Control tokens such as <|im_end|> are shown, and an incomplete
    UTF-8 character becomes U+FFFD.
    """
    return runner.model.piece(token, special=True).decode("utf-8", "replace")


def _draft_record(runner: Runner) -> dict[str, Any]:
    """Return the field `draft` of the JSON document, if the user has turned drafting on."""
    if not runner.drafting.is_requested:
        return {}
    file = runner.drafting.file
    return {
        "draft": {
            "model": str(file) if file else None,
            "ngram": runner.ngram_draft,
            "method": runner.drafting.method,
            "obstacle": runner.draft_obstacle or None,
        }
    }


def _timing_record(runner: Runner, answer: Answer) -> dict[str, Any]:
    """Return the field `timing` of the JSON document. If the user has turned drafting on, it has
    the numbers of drafted tokens, even if these are 0. After drafts it has their counts by depth.
    """
    gap_ms = token_gaps(answer)
    itl = {f"p{share * 100:.0f}": percentile(gap_ms, share) for share in PERCENTILES}
    draft_counts = (
        {}
        if answer.n_drafted is None and not runner.drafting.is_requested
        else {"drafted_tokens": answer.n_drafted or 0, "accepted_tokens": answer.n_accepted}
    )
    return {
        "load_ms": runner.load_ms,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "prompt_ms": answer.prompt_ms,
        "prompt_per_second": answer.prompt_per_second,
        "ttft_ms": answer.ttft_ms,
        "ttfo_ms": answer.ttfo_ms,
        "thinking_tokens": answer.n_thinking,
        "generated_tokens": len(answer.tokens),
        "generate_ms": answer.generate_ms,
        "tokens_per_second": answer.tokens_per_second,
        "tpot_ms": answer.tpot_ms,
        "itl_ms": {**itl, "max": max(gap_ms, default=0.0)},
        **draft_counts,
        **(
            {
                "tokens_per_pass": answer.tokens_per_pass,
                "drafts": [draft_document(one) for one in answer.drafts],
            }
            if answer.drafts
            else {}
        ),
    }


def draft_document(counts: DraftCounts) -> dict[str, Any]:
    """Return the JSON object of the drafts of one method. The lists begin with the first guesses of
    drafts; `draft_ms` is the time for making the drafts.
    """
    return {
        "method": counts.method,
        "drafts": counts.n_drafts,
        "guesses": counts.guesses,
        "checked": counts.checked,
        "right": counts.right,
        "draft_ms": counts.seconds * 1e3,
    }


def format_beams(answer: Answer) -> list[str]:
    """Return one line with score and text for each result of a beam search, the best first. Empty
    if the answer is not from a beam search.
    """
    return [
        f"beam {number}  {beam.score:.4f}  {escape_line(beam.text)}"
        for number, beam in enumerate(answer.beams, 1)
    ]


def token_gaps(answer: Answer) -> list[float]:
    """Return the milliseconds between each token of an answer and the next."""
    return [token.ms for token in answer.tokens[1:]]


def used_cache_bytes(cache: KVCache, used: int) -> int:
    """Return the bytes of the cache that `used` cells take. A layer with a sliding window has fewer
    cells than the cache, and counts at most these.
    """
    return sum(
        min(used, layer.cells) * (layer.k_bytes + layer.v_bytes) // layer.cells
        for layer in cache.layers
    )


def format_timing(runner: Runner, answer: Answer, shows_load: bool = False) -> str:
    """Return the line about the time of an answer, for example `[ttft 41 ms · prefill 12 tok
    298 tok/s (+61 reused) · 45 tok 104.2 tok/s · p50 9.4 p99 12.1 ms · KV …]`. After thinking, it
    also has the time to the first token of the reply. `shows_load`: end it with the time to load
    the model.
    """
    gap_ms = token_gaps(answer)
    parts = [
        f"ttft {answer.ttft_ms:.0f} ms",
        *_describe_thinking([answer]),
        _describe_prefill(answer),
        f"{len(answer.tokens)} tok {answer.tokens_per_second:.1f} tok/s",
        f"p50 {percentile(gap_ms, 0.5):.1f} p99 {percentile(gap_ms, 0.99):.1f} ms",
        *_describe_grammar(answer),
        *_describe_drafts(runner, answer),
        _describe_cache(runner),
        *_describe_threads(runner),
        *([f"loaded in {runner.load_ms / 1000:.1f} s"] if shows_load else []),
    ]
    return f"[{' · '.join(parts)}]" + (
        f" ({FINISH_NOTES[answer.finish]})" if answer.finish in FINISH_NOTES else ""
    )


def _describe_threads(runner: Runner) -> list[str]:
    """Return a text such as `1 of 2 threads` if fewer threads compute tokens now, because other
    programs use the processor; else nothing.
    """
    team = runner.engine.thread_team
    if team is None or team.count == team.most:
        return []
    return [f"{team.count} of {team.most} threads"]


def report_lines(runner: Runner, answer: Answer, timing: str) -> list[str]:
    """Return the lines to print below an answer: none, the timing line, or also the milliseconds of
    each token. `timing`: one of display_settings.TIMING_MODES.
    """
    if timing == "off":
        return []
    token_line = [" ".join(f"{escape_line(token.text)}|{token.ms:.1f}" for token in answer.tokens)]
    return [
        *(token_line if timing == "tokens" and answer.tokens else ()),
        format_timing(runner, answer),
    ]


def format_samples_timing(runner: Runner, answers: Sequence[Answer]) -> str:
    """Return the line about the time of several answers to one prompt, for example `[4 samples ·
    ttft 41 ms · prefill 12 tok 298 tok/s (+0 reused) · 180 tok 61.2 tok/s together · KV …]`.
    """
    first = answers[0]
    end_ms = [answer.ttft_ms + answer.generate_ms for answer in answers]
    n_tokens = sum(max(0, len(answer.tokens) - 1) for answer in answers)
    seconds = (max(end_ms) - min(answer.ttft_ms for answer in answers)) / 1000
    n_generated = sum(len(answer.tokens) for answer in answers)
    rate = n_tokens / seconds if seconds else 0
    parts = [
        f"{len(answers)} samples",
        f"ttft {first.ttft_ms:.0f} ms",
        *_describe_thinking(answers),
        _describe_prefill(first),
        f"{n_generated} tok {rate:.1f} tok/s together",
        _describe_cache(runner),
    ]
    n_full = sum(answer.finish == "context_full" for answer in answers)
    return f"[{' · '.join(parts)}]" + (
        f" ({n_full} stopped: the context is full)" if n_full else ""
    )


def _describe_drafts(runner: Runner, answer: Answer) -> list[str]:
    """Return a text about the drafts for the timing line, such as `drafts: mtp 38 of 61 right, 2.1
    tokens a pass`. It is empty if there were none, unless the user has turned drafting on.
    """
    if answer.drafts:
        counts = ", ".join(
            f"{one.method} {one.n_right} of {one.n_guesses}" for one in answer.drafts
        )
        return [f"drafts: {counts} right, {answer.tokens_per_pass:.1f} tokens a pass"]
    speculation = runner.engine.resources.speculation  # None if it was switched off since
    if not runner.drafting.is_requested or speculation is None or len(answer.tokens) < 2:
        return []
    ratio = speculation.pass_cost.ratio(PASS_ROWS[0])
    return [
        "nothing drafted: no guess was likely enough, because here "
        f"{PASS_ROWS[0]} tokens at once take {ratio:.1f} passes"
    ]


def _describe_thinking(answers: Sequence[Answer]) -> list[str]:
    """Return a text about the thinking for the timing line: the time to the first token of the
    first reply, and the number of thinking tokens. Empty list if the model has not thought.
    """
    n_thinking = sum(answer.n_thinking for answer in answers)
    if all(answer.answer_start == 0 or not answer.tokens for answer in answers):
        return []
    times = [answer.ttfo_ms for answer in answers if answer.ttfo_ms is not None]
    reply = f"ttfo {min(times):.0f} ms" if times else "no reply"
    return [f"{reply} after {n_thinking} thinking tok"]


def _describe_grammar(answer: Answer) -> list[str]:
    """Return a text about the grammar for the timing line: the number of forced tokens, and the
    grammar's milliseconds per token. Empty list without a grammar.
    """
    milliseconds = sum(token.constraint_ms for token in answer.tokens)
    if not milliseconds:
        return []
    forced = sum(token.forced for token in answer.tokens)
    return [f"{forced} tok forced, grammar {milliseconds / len(answer.tokens):.2f} ms/tok"]


def _describe_prefill(answer: Answer) -> str:
    """Return a text such as `prefill 12 tok 298 tok/s (+61 reused)`."""
    n_computed = answer.prompt_tokens - answer.cached_tokens
    rate = answer.prompt_per_second
    return f"prefill {n_computed} tok {rate:.0f} tok/s (+{answer.cached_tokens} reused)"


def _describe_cache(runner: Runner) -> str:
    """Return a text about the used cells of the KV cache and, if it is known, their size."""
    kv = runner.kv_report()
    cache = runner.predict_cache(kv.type_k, kv.type_v)
    used = f"KV {kv.used_cells}/{kv.cells} cells"
    return (
        f"{used} {format_size(used_cache_bytes(cache, kv.used_cells))} of {format_size(cache.nbytes)}"
        if cache
        else used
    )
