#!/usr/bin/env python3
"""Measure JSON-schema constraints: accepted schemas, finished and valid documents, cost per token.

usage: .venv/bin/python scripts/benchmarks/constraints.py MODEL.gguf
       [--schemas ../shared/assets/json-schema] [--count 300] [--timed 60] [--tokens 512]
       [--temp 0.8] [--threads N]

Each schema is one question (its own, if it has one) and one answer of at most --tokens tokens;
jsonschema validates the document. For --timed of them the same question is also answered without a
schema, to the same number of tokens, and with the schema but without forced text. The three answers
change places after the prompt is in the cache. The script prints medians of ratios of the time per
token, with 95% bootstrap intervals. --count uses fewer schemas, evenly spread.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jsonschema
import regex

from llmcli.errors import UserError
from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.requests.request import Answer, Request, RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import Sampling, default_sampling
from llmcli.types import Message
from scripts.benchmarks.paired_runs import interval

HERE = Path(__file__).resolve().parents[2]
WAYS = ("lossless", "off", "free")


@dataclass(frozen=True)
class Case:
    """A schema and the question that its document answers."""

    name: str
    schema: Any
    question: str

    @property
    def message(self) -> Message:
        """Return the message to the model."""
        asked = "Answer with a short JSON document of this schema"
        return Message("user", f"{self.question}\n{asked}: {json.dumps(self.schema)}")


def cases(folder: Path, count: int) -> list[Case]:
    """Return `count` schemas, evenly spread."""
    rows = [
        json.loads(line)
        for name in ("functions", "suite")
        for line in (folder / f"{name}.jsonl").open()
    ]
    found = [
        Case(row["id"], row["schema"], row.get("prompt", "Write a short example.")) for row in rows
    ]
    return [found[index * len(found) // count] for index in range(min(count, len(found)))]


def answer(runner: Runner, request: Request) -> Answer:
    """Return one complete answer."""
    reply = runner.reply(request)
    list(reply)
    return reply.answer


def verdict(case: Case, made: Answer) -> str:
    """Return "valid", "INVALID", or why the document has no end."""
    if made.finish != "stop":
        return made.finish
    own = jsonschema.validators.validator_for(case.schema, jsonschema.Draft202012Validator)
    validator = jsonschema.validators.extend(own, {"pattern": pattern})
    return "valid" if validator(case.schema).is_valid(json.loads(made.text)) else "INVALID"


def pattern(_: Any, wanted: str, value: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    """Validate `pattern` with regex; Python's re has no Unicode classes."""
    if isinstance(value, str) and not regex.search(wanted, value):
        yield jsonschema.ValidationError(f"{value!r} does not match {wanted!r}")


def milliseconds(made: Answer) -> float:
    """Return the time per token after the first, which belongs to the prompt."""
    return made.generate_ms / max(1, len(made.tokens) - 1)


def timed(runner: Runner, request: Request, length: int, turn: int) -> dict[str, Answer]:
    """Answer the same question in each way, starting with another way each turn."""
    assert request.grammar
    off = runner.grammars(replace(request.grammar.constraint, jump="off"))
    asked = {
        "lossless": request,
        "off": replace(request, grammar=off),
        "free": replace(
            request, grammar=None, strategy="plain", ignore_eos=True, max_tokens=length
        ),
    }
    order = [WAYS[(turn + place) % len(WAYS)] for place in range(len(WAYS))]
    return {way: answer(runner, asked[way]) for way in order}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "--schemas", type=Path, default=HERE.parent / "shared" / "assets" / "json-schema"
    )
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--timed", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--temp", default=default_sampling()["temp"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    asked = parser.parse_args()
    begun = time.perf_counter()
    wanted = cases(asked.schemas, asked.count)
    sampling = default_sampling().with_values({"temp": asked.temp, "seed": 1})
    with open_runner(asked.model, RunOptions(ctx_size=4096, threads=asked.threads)) as runner:
        told(runner, wanted, sampling, asked)
    print(f"{time.perf_counter() - begun:.0f} s in all")


def told(runner: Runner, wanted: list[Case], sampling: Sampling, asked: argparse.Namespace) -> None:
    """Answer all questions; print each result, then the sums."""
    verdicts, refused, tokens, forced = Counter[str](), 0, 0, 0
    ratios: dict[str, list[float]] = {"off / free": [], "lossless / free": [], "lossless / off": []}
    bill: list[float] = []
    every = max(1, len(wanted) // max(1, asked.timed))
    for turn, case in enumerate(wanted):
        try:
            grammar = runner.grammars(Constraint("json_schema", json.dumps(case.schema)))
        except UserError as error:
            refused += 1
            print(f"refused   {case.name}: {error}")
            continue
        prompt = runner.encode_chat([case.message])
        request = Request(prompt, sampling, asked.tokens, strategy="guided", grammar=grammar)
        made = answer(runner, request)
        result = verdict(case, made)
        verdicts[result] += 1
        tokens += len(made.tokens)
        forced += sum(token.forced for token in made.tokens)
        bill += [token.constraint_ms for token in made.tokens]
        if result != "valid":
            print(f"{result:9} {case.name}: {made.text[:100]!r}")
        if asked.timed and turn % every == 0 and len(made.tokens) > 8:
            ways = {
                way: milliseconds(one)
                for way, one in timed(runner, request, len(made.tokens), turn).items()
            }
            for pair, values in ratios.items():
                one, other = pair.split(" / ")
                values.append(ways[other] / ways[one])
    accepted = sum(verdicts.values())
    print(f"schemas: {accepted} of {len(wanted)} accepted, {refused} refused")
    print("documents: " + ", ".join(f"{count} {word}" for word, count in verdicts.most_common()))
    print(
        f"finished within {asked.tokens} tokens: {(verdicts['valid'] + verdicts['INVALID']) / accepted:.1%}"
    )
    print(
        f"tokens: {tokens}, {forced / tokens:.1%} forced; grammar: median {statistics.median(bill):.3f} ms per token,"
        f" mean {statistics.mean(bill):.3f}, most {max(bill):.1f}"
    )
    for pair, values in ratios.items():
        if values:
            low, high = interval(values)
            print(
                f"tokens per second, {pair}: median {statistics.median(values):.3f}"
                f"  95% interval {low:.3f} to {high:.3f}  ({len(values)} answers)"
            )


if __name__ == "__main__":
    main()
