"""Reports the figures of a server's answer: its JSON document and the timing line. The times are of
chunks of the stream, since a server may group tokens.
"""

from typing import Any

from llmcli.chat.display.answer_report import FINISH_NOTES, PERCENTILES, token_gaps
from llmcli.chat.display.styles import escape_line
from llmcli.chat.server.server_answer import ServerAnswer
from llmcli.runtime.requests.request import percentile
from llmcli.units import format_count

# notes on the server's reasons for the end of an answer, besides "stop" and "length"
SERVER_FINISH_NOTES = {
    "content_filter": "the server's filter ended it",
    "tool_calls": "the server wants to call a tool, which chat does not do",
    "function_call": "the server wants to call a tool, which chat does not do",
}


def chunk_gaps(answer: ServerAnswer) -> list[float]:
    """Return the milliseconds between each chunk and the next."""
    return [gap for gap in token_gaps(answer) if gap]


def build_document(address: str, name: str, answer: ServerAnswer) -> dict[str, Any]:
    """Return an answer as a JSON document with those fields of `run --json` whose values a server
    sends.
    """
    usage, gaps = answer.usage, chunk_gaps(answer)
    itl = {f"p{share * 100:.0f}": percentile(gaps, share) for share in PERCENTILES}
    return {
        "model": {"name": name, "server": address},
        "text": answer.text,
        "finish": answer.finish,
        "server_finish": answer.server_finish,
        "tokens": [
            {"text": token.text, "ms": token.ms, "logprob": token.logprob}
            for token in answer.tokens
        ],
        "timing": {
            "prompt_tokens": usage.prompt if usage else None,
            "cached_tokens": usage.cached if usage else None,
            "ttft_ms": answer.ttft_ms,
            "generated_tokens": answer.n_generated,
            "generate_ms": answer.generate_ms,
            "tokens_per_second": answer.tokens_per_second,
            "tpot_ms": answer.tpot_ms,
            "itl_ms": {**itl, "max": max(gaps, default=0.0)},
            "chunks": answer.n_chunks,
        },
        "seed": answer.seed,
    }


def format_timing(answer: ServerAnswer) -> str:
    """Return the line about the time of an answer, for example `[ttft 41 ms · prompt 73 tok (61
    cached) · 45 tok 104.2 tok/s · 23 chunks p50 18.9 p99 24.1 ms]`.
    """
    usage, gaps = answer.usage, chunk_gaps(answer)
    parts = [f"ttft {answer.ttft_ms:.0f} ms"]
    if usage and usage.prompt is not None:
        cached = "" if usage.cached is None else f" ({usage.cached} cached)"
        parts.append(f"prompt {usage.prompt} tok{cached}")
    speed = f" {answer.tokens_per_second:.1f} tok/s" if answer.tokens_per_second else ""
    if usage and usage.output is not None:
        parts.append(f"{usage.output} tok{speed}")
    else:
        parts.append("tokens not counted by the server")
    parts.append(
        f"{format_count(answer.n_chunks, 'chunk')} "
        f"p50 {percentile(gaps, 0.5):.1f} p99 {percentile(gaps, 0.99):.1f} ms"
    )
    notes = [
        note
        for note in (
            FINISH_NOTES.get(answer.finish),
            SERVER_FINISH_NOTES.get(answer.server_finish),
        )
        if note
    ]
    return f"[{' · '.join(parts)}]" + "".join(f" ({note})" for note in notes)


def report_lines(answer: ServerAnswer, timing: str) -> list[str]:
    """Return the lines to print below an answer: none, the timing line, or also the milliseconds of
    each chunk. `timing`: one of display_settings.TIMING_MODES.
    """
    if timing == "off":
        return []
    chunk_line = [" ".join(f"{escape_line(token.text)}|{token.ms:.1f}" for token in answer.tokens)]
    return [
        *(chunk_line if timing == "tokens" and answer.tokens else ()),
        format_timing(answer),
    ]
