#!/usr/bin/env python3
"""Replay an agent's conversation over Anthropic's API, and measure how much of each prompt is computed.

usage: .venv/bin/python scripts/benchmarks/agent_replay.py URL [--model NAME] [--turns 30]
       [--words 40] [--answer 8] [--key KEY]

URL is a running server, such as http://127.0.0.1:8080. Each turn is a request as Claude Code sends
it: the system text begins with a billing header whose `cch` is new each time, then come the agent's
instructions, its tools, and the conversation so far, to which each turn adds a call of a tool and
its result of --words words. The calls are fixed, so that every server gets the same texts. The
script prints for each turn the tokens of the prompt, those that are new since the last turn, those
that were in the cache, and those that were computed, with the time of the answer. It fails if a
turn after the first computes more than what is new, and a few tokens at the end of the last prompt
that a chat template may write differently (SLACK_TOKENS).
"""

import argparse
import json
import random
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SLACK_TOKENS = 8
SECONDS = 600  # for one answer
INSTRUCTIONS = (
    "You are an interactive agent that helps users with software engineering tasks. Read files "
    "before you change them. Run the tests after each change. Say what you did in one sentence. "
)
TOOLS = [
    {
        "name": name,
        "description": description,
        "input_schema": {
            "type": "object",
            "properties": {"path": {"type": "string"}},
            "required": ["path"],
        },
    }
    for name, description in (("Read", "Reads a file"), ("Test", "Runs the tests of a folder"))
]
WORDS = ("the", "file", "has", "a", "class", "with", "methods", "that", "open", "one", "table")


@dataclass(frozen=True, slots=True)
class ReplayTurn:
    """One turn: the tokens of its prompt, how many are new since the last turn, how many were in the
    cache, and the seconds until the answer was complete.
    """

    tokens: int
    new: int
    cached: int
    seconds: float

    @property
    def computed(self) -> int:
        """The tokens of the prompt that were computed."""
        return self.tokens - self.cached

    @property
    def computes_only_new(self) -> bool:
        """Whether only what is new was computed."""
        return self.computed <= self.new + SLACK_TOKENS


def agent_requests(turns: int, words: int, answer_tokens: int, seed: int = 0) -> Iterator[Any]:
    """Yield the requests of a conversation, each as a JSON object without a model. `words`: of a
    tool's result. `seed`: of the nonces and of the results.
    """
    rng = random.Random(seed)
    system_text = INSTRUCTIONS * 4
    messages: list[Any] = [{"role": "user", "content": "Why does the first test fail?"}]
    for turn in range(turns):
        header = (
            "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; "
            f"cch={rng.getrandbits(20):05x};"
        )
        yield {
            "max_tokens": answer_tokens,
            "system": [
                {"type": "text", "text": header},
                {"type": "text", "text": "You are Claude Code, Anthropic's official CLI."},
                {"type": "text", "text": system_text, "cache_control": {"type": "ephemeral"}},
            ],
            "tools": TOOLS,
            "messages": list(messages),
        }
        call = {"type": "tool_use", "id": f"toolu_{turn}", "name": rng.choice(TOOLS)["name"]}
        text = {"type": "text", "text": "I look at it."}
        messages += [
            {"role": "assistant", "content": [text, {**call, "input": {"path": f"{turn}.py"}}]},
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": call["id"],
                        "content": " ".join(rng.choices(WORDS, k=words)),
                    }
                ],
            },
        ]


def replay(url: str, requests: Iterator[Any], model: str, key: str = "") -> Iterator[ReplayTurn]:
    """Send the requests of a conversation in turn, and yield what each has cost."""
    last_tokens = 0
    for body in requests:
        start_time = time.perf_counter()
        request = urllib.request.Request(
            f"{url.rstrip('/')}/v1/messages",
            json.dumps({"model": model, "temperature": 0, **body}).encode(),
            {
                "content-type": "application/json",
                "anthropic-version": "2023-06-01",
                **({"x-api-key": key} if key else {}),
            },
        )
        with urllib.request.urlopen(request, timeout=SECONDS) as response:
            usage = json.load(response)["usage"]
        cached = usage["cache_read_input_tokens"]
        tokens = usage["input_tokens"] + cached
        yield ReplayTurn(tokens, tokens - last_tokens, cached, time.perf_counter() - start_time)
        last_tokens = tokens


def main() -> int:
    """Replay a conversation and print the cost of each turn. Return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("--model", default="default")
    parser.add_argument("--key", default="")
    for name, value in (("turns", 30), ("words", 40), ("answer", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    requests = agent_requests(args.turns, args.words, args.answer)
    n_tokens = n_computed = n_lost = 0
    print(f"{'turn':>4} {'prompt':>7} {'new':>6} {'cached':>7} {'computed':>9} {'seconds':>8}")
    for number, turn in enumerate(replay(args.url, requests, args.model, args.key), 1):
        is_lost = number > 1 and not turn.computes_only_new
        n_tokens, n_computed = n_tokens + turn.tokens, n_computed + turn.computed
        n_lost += is_lost
        print(
            f"{number:4} {turn.tokens:7} {turn.new:6} {turn.cached:7} {turn.computed:9} "
            f"{turn.seconds:8.2f}{'  prefix lost' if is_lost else ''}",
            flush=True,
        )
    print(f"{n_computed:,} of {n_tokens:,} prompt tokens computed; {n_lost} turns lost a prefix")
    return 1 if n_lost else 0


if __name__ == "__main__":
    sys.exit(main())
