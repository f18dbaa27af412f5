#!/usr/bin/env python3
"""Measure JSON-schema constraints: accepted schemas, finished and valid documents, cost per token.

usage: .venv/bin/python scripts/benchmarks/constraints.py MODEL.gguf
       [--schemas ../shared/assets/json-schema] [--count 300] [--timed 60] [--tokens 512]
       [--temp 0.8] [--threads N]

For each schema the model answers one question (the schema's own question, if the file has one) with
at most --tokens tokens, and jsonschema validates the document. About --timed of the questions are
answered three times: with the schema, with the schema but without forced text, and without a
schema to the same number of tokens. The order of the three answers changes from question to
question, and the prompt is in the cache before all of them. The script prints median ratios of
tokens per second with 95% bootstrap intervals. --count is the number of schemas that are used,
evenly spread over the files.
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
    """A JSON schema, and the question that the model answers with a document of this schema."""

    name: str
    schema: Any
    question: str

    @property
    def message(self) -> Message:
        """The user's message: the question, followed by the schema."""
        instruction = "Answer with a short JSON document of this schema"
        return Message("user", f"{self.question}\n{instruction}: {json.dumps(self.schema)}")


def cases(folder: Path, count: int) -> list[Case]:
    """Return `count` cases, evenly spread over the lines of `functions.jsonl` and `suite.jsonl`."""
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
    """Run one request to its end, and return the answer."""
    reply = runner.reply(request)
    list(reply)
    return reply.answer


def verdict(case: Case, answer_made: Answer) -> str:
    """Return "valid" or "INVALID" for a finished document, else the reason why the answer ended
    early, such as "length".
    """
    if answer_made.finish != "stop":
        return answer_made.finish
    own = jsonschema.validators.validator_for(case.schema, jsonschema.Draft202012Validator)
    validator = jsonschema.validators.extend(own, {"pattern": pattern})
    return "valid" if validator(case.schema).is_valid(json.loads(answer_made.text)) else "INVALID"


def pattern(_: Any, wanted: str, value: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    """Validate the keyword `pattern` with the package regex, because re has no Unicode classes."""
    if isinstance(value, str) and not regex.search(wanted, value):
        yield jsonschema.ValidationError(f"{value!r} does not match {wanted!r}")


def milliseconds(answer_made: Answer) -> float:
    """Return the milliseconds per token. The first token is not counted, because its time belongs
    to the prompt.
    """
    return answer_made.generate_ms / max(1, len(answer_made.tokens) - 1)


def timed(runner: Runner, request: Request, length: int, turn: int) -> dict[str, Answer]:
    """Answer the same question in each of WAYS, and return the answers by way.

    `length`: number of tokens of the answer without a schema. `turn`: the number of the question;
    it decides which way is first.
    """
    assert request.grammar
    off = runner.grammars(replace(request.grammar.constraint, jump="off"))
    requests = {
        "lossless": request,
        "off": replace(request, grammar=off),
        "free": replace(
            request, grammar=None, strategy="plain", ignore_eos=True, max_tokens=length
        ),
    }
    order = [WAYS[(turn + place) % len(WAYS)] for place in range(len(WAYS))]
    return {way: answer(runner, requests[way]) for way in order}


def main() -> None:
    """Parse the flags, then measure and print."""
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
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    begun = time.perf_counter()
    wanted = cases(args.schemas, args.count)
    sampling = default_sampling().with_values({"temp": args.temp, "seed": 1})
    with open_runner(args.model, RunOptions(ctx_size=4096, threads=args.threads)) as runner:
        measure_all(runner, wanted, sampling, args)
    print(f"{time.perf_counter() - begun:.0f} s in all")


def measure_all(
    runner: Runner, wanted: list[Case], sampling: Sampling, args: argparse.Namespace
) -> None:
    """Answer the questions of all cases. Print a line for each refused schema and each document
    that is not valid, then the totals.
    """
    verdicts, refused, tokens, forced = Counter[str](), 0, 0, 0
    ratios: dict[str, list[float]] = {"off / free": [], "lossless / free": [], "lossless / off": []}
    grammar_ms: list[float] = []
    every = max(1, len(wanted) // max(1, args.timed))
    for turn, case in enumerate(wanted):
        try:
            grammar = runner.grammars(Constraint("json_schema", json.dumps(case.schema)))
        except UserError as error:
            refused += 1
            print(f"refused   {case.name}: {error}")
            continue
        prompt = runner.encode_chat([case.message])
        request = Request(prompt, sampling, args.tokens, strategy="guided", grammar=grammar)
        answer_made = answer(runner, request)
        result = verdict(case, answer_made)
        verdicts[result] += 1
        tokens += len(answer_made.tokens)
        forced += sum(token.forced for token in answer_made.tokens)
        grammar_ms += [token.constraint_ms for token in answer_made.tokens]
        if result != "valid":
            print(f"{result:9} {case.name}: {answer_made.text[:100]!r}")
        if args.timed and turn % every == 0 and len(answer_made.tokens) > 8:
            times = {
                way: milliseconds(milliseconds_made)
                for way, milliseconds_made in timed(
                    runner, request, len(answer_made.tokens), turn
                ).items()
            }
            for pair, values in ratios.items():
                milliseconds_made, other = pair.split(" / ")
                values.append(times[other] / times[milliseconds_made])
    accepted = sum(verdicts.values())
    print(f"schemas: {accepted} of {len(wanted)} accepted, {refused} refused")
    print("documents: " + ", ".join(f"{count} {word}" for word, count in verdicts.most_common()))
    print(
        f"finished within {args.tokens} tokens: {(verdicts['valid'] + verdicts['INVALID']) / accepted:.1%}"
    )
    print(
        f"tokens: {tokens}, {forced / tokens:.1%} forced; grammar: median {statistics.median(grammar_ms):.3f} ms per token,"
        f" mean {statistics.mean(grammar_ms):.3f}, most {max(grammar_ms):.1f}"
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
