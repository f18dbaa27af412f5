#!/usr/bin/env python3
"""Count the clean answers of a small model to schemas that say nothing of additional properties.

usage: .venv/bin/python scripts/reference/open_schemas.py MODEL.gguf [--count 20] [--tokens 256]
           [--temp 0.8] [--threads N]

Each of three pydantic models is the schema of --count answers to different questions, with another
seed each. An answer is clean if it ends by itself within --tokens tokens, and if pydantic accepts
it and it has no other names than the model's fields.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[2]))

from pydantic import BaseModel, ConfigDict, ValidationError

from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.requests.request import Answer, Request, RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import default_sampling
from llmcli.types import Message


class City(BaseModel):
    """A city."""

    name: str
    country: str
    population: int
    is_capital: bool


class Event(BaseModel):
    """An event with its participants."""

    title: str
    day: Literal["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
    participants: list[str]
    place: str | None = None


class Ingredient(BaseModel):
    """An ingredient of a recipe."""

    name: str
    grams: float


class Recipe(BaseModel):
    """A short recipe."""

    title: str
    minutes: int
    ingredients: list[Ingredient]


PLACES = ["Paris", "Oslo", "Lima", "Cairo", "Kyoto", "Delhi", "Bonn", "Quito", "Perth", "Accra"]
PEOPLE = ["Ann and Bob", "Eve and Carl", "my team", "two friends", "the Millers"]
DISHES = ["pancakes", "lentil soup", "apple pie", "fried rice", "a Greek salad"]
QUESTIONS: dict[type[BaseModel], list[str]] = {
    City: [f"Describe the city {place} in a few facts." for place in PLACES],
    Event: [f"Plan a short meeting of {people} on a day of the week." for people in PEOPLE],
    Recipe: [f"Give a short recipe for {dish} with three ingredients." for dish in DISHES],
}


def answer(
    runner: Runner, kind: type[BaseModel], question: str, seed: int, flags: argparse.Namespace
) -> Answer:
    """Return the answer to a question with the schema of a model."""
    grammar = runner.grammars(Constraint("json_schema", json.dumps(kind.model_json_schema())))
    request = Request(
        runner.encode_chat([Message("user", f"{question} Answer in JSON.")]),
        default_sampling().with_values({"temp": flags.temp, "seed": seed}),
        flags.tokens,
        grammar=grammar,
        strategy=runner.default_strategy(grammar),
    )
    reply = runner.reply(request)
    list(reply)
    return reply.answer


def find_fault(kind: type[BaseModel], answer: Answer) -> str:
    """Return why an answer is not clean, or an empty text."""
    if answer.finish != "stop":
        return f"ends by {answer.finish}"
    closed = type(kind.__name__, (kind,), {"model_config": ConfigDict(extra="forbid")})
    try:
        closed.model_validate_json(answer.text)
    except ValidationError as error:
        return " ".join(str(error).split())
    return ""


def main() -> None:
    """Parse the flags and count the clean answers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--count", type=int, default=20, help="answers to each schema")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--temp", type=float, default=0.8)
    parser.add_argument("-t", "--threads", type=int, default=1)
    flags = parser.parse_args()
    n_clean = n_tokens = 0
    with open_runner(flags.model, RunOptions(ctx_size=1024, threads=flags.threads)) as runner:
        for kind, questions in QUESTIONS.items():
            for seed in range(flags.count):
                result = answer(runner, kind, questions[seed % len(questions)], seed, flags)
                fault = find_fault(kind, result)
                n_clean += not fault
                n_tokens += len(result.tokens)
                if fault:
                    print(f"  {kind.__name__}: {fault}: {result.text[:200]!r}", flush=True)
    total = flags.count * len(QUESTIONS)
    print(f"{flags.model.name}: {n_clean} of {total} answers are clean; {n_tokens} tokens")


if __name__ == "__main__":
    main()
