#!/usr/bin/env python3
"""Compare answers to JSON schemas with `--jump lossless` and with `--jump off`: the same token ids?

usage: .venv/bin/python scripts/reference/jump_lossless.py [MODEL.gguf …] [--count 2000]
           [--tokens 40] [--temp 0] [--threads N] [--reproducible]
           [--functions ../shared/assets/json-schema/functions.jsonl]

Without a MODEL, the stories model in tests/data is converted. The schemas are those of the everyday
types in tests/cases/schemas and, where the file is there, of --functions with their questions. Each
of --count pairs of a schema and a prompt is answered twice by each model, and the ids of the tokens
are compared. The script prints the number of equal pairs, the tokens that were forced, and every
pair that differs. It exits with 1 if one differs.
"""

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.requests.request import Answer, Request, RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import default_sampling
from scripts.fuzz.files import convert_stories

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "tests" / "cases" / "schemas"
PROMPTS = (
    "A person",
    "Once upon a time",
    "Answer as JSON:",
    "The cat sat on the mat. In JSON this is",
    "Q: What is the capital of France?\nA:",
    "```json\n",
)


@dataclass(frozen=True)
class Pair:
    """A schema and a prompt."""

    schema: Any
    prompt: str


def make_pairs(functions: Path, count: int) -> Iterator[Pair]:
    """Yield `count` pairs: first each schema with its own question or one prompt, then each with
    the next prompt, and so on.
    """
    schemas = [
        (json.loads(line)["schema"], None)
        for name in ("pydantic", "zod")
        for line in (CASES / f"{name}.jsonl").open()
    ]
    if functions.exists():
        schemas += [(row["schema"], row["prompt"]) for row in map(json.loads, functions.open())]
    pairs = (
        Pair(
            schema, question if turn == 0 and question else f"{PROMPTS[turn % len(PROMPTS)]}{mark}"
        )
        for turn in itertools.count()
        for mark in [" " * (turn // len(PROMPTS))]
        for schema, question in schemas
    )
    return itertools.islice(pairs, count)


def answer(runner: Runner, pair: Pair, jump: str, tokens: int, temp: float) -> Answer:
    """Return the answer to a pair with this jump mode."""
    constraint = Constraint("json_schema", json.dumps(pair.schema), jump=jump)
    grammar = runner.grammars(constraint)
    request = Request(
        tuple(runner.encode_prompt(pair.prompt)),
        default_sampling().with_values({"temp": temp, "seed": 1}),
        tokens,
        grammar=grammar,
        strategy=runner.default_strategy(grammar),
    )
    reply = runner.reply(request)
    list(reply)
    return reply.answer


def compare_model(path: Path, arguments: argparse.Namespace) -> int:
    """Compare all pairs with one model. Return how many differ."""
    options = RunOptions(ctx_size=1024, threads=arguments.threads)
    options = replace(options, reproducible=arguments.reproducible)
    n_equal = n_forced = n_tokens = n_pairs = 0
    with open_runner(path, options) as runner:
        for pair in make_pairs(arguments.functions, arguments.count):
            # both answers then find the same prompt in the cache
            answer(runner, pair, "off", 1, arguments.temp)
            results = [
                answer(runner, pair, jump, arguments.tokens, arguments.temp)
                for jump in ("off", "lossless")
            ]
            ids = [[token.id for token in result.tokens] for result in results]
            n_pairs += 1
            n_equal += ids[0] == ids[1] and results[0].finish == results[1].finish
            n_tokens += len(ids[1])
            n_forced += sum(token.forced for token in results[1].tokens)
            if ids[0] != ids[1]:
                print(f"  differs: {pair.prompt!r} {json.dumps(pair.schema)[:300]}")
                for result in results:
                    print(f"    {result.text!r}", flush=True)
            if n_pairs % 200 == 0:
                print(f"  {n_equal} of {n_pairs} equal", file=sys.stderr, flush=True)
    print(
        f"{path.name}: {n_equal} of {n_pairs} pairs have the same ids; "
        f"{n_forced} of {n_tokens} tokens were forced",
        flush=True,
    )
    return n_pairs - n_equal


def main() -> None:
    """Parse the flags and compare each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--temp", type=float, default=0)
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--reproducible", action="store_true")
    default = ROOT.parent / "shared" / "assets" / "json-schema" / "functions.jsonl"
    parser.add_argument("--functions", type=Path, default=default)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = list(arguments.models)
        if not models:
            models = [convert_stories(Path(folder, "stories260K.gguf"), "F32")]
        differing = sum(compare_model(model, arguments) for model in models)
    raise SystemExit(int(differing > 0))


if __name__ == "__main__":
    main()
