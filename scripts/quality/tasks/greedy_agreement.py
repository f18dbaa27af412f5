#!/usr/bin/env python3
"""Compare how long quantized files write the same text as the original model.

usage: .venv/bin/python scripts/quality/tasks/greedy_agreement.py ORIGINAL.gguf FILE.gguf ...
       --text NAME=FILE ... [--prompts 8] [--tokens 256] [--threads 2]

Every file continues the same beginnings, which are spread over the texts, by its likeliest tokens.
For each file the script prints the mean number of tokens until the first one that differs from the
original's, with its standard error, the share of continuations that are equal to the end, and the
share of equal tokens at equal places.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from scripts.quality.tasks.answers import answer

BEGINNING_CHARS = 400
PARALLEL = 4


def main() -> None:
    """Parse the flags, continue the beginnings with every file and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("original", type=Path)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--text", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--prompts", type=int, default=8, help="beginnings of each text")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("-t", "--threads", type=int, default=2)
    args = parser.parse_args()
    prompts = [
        beginning
        for pair in args.text
        for beginning in beginnings(Path(pair.split("=", 1)[1]).read_text(), args.prompts)
    ]
    expected = continuations(args.original, prompts, args.tokens, args.threads)
    print(f"{len(prompts)} beginnings, {args.tokens} tokens each")
    print("file | equal tokens until the first difference | all equal | equal places")
    for file in args.files:
        found = continuations(file, prompts, args.tokens, args.threads)
        pairs = [*zip(expected, found, strict=True)]
        lengths = [equal_beginning(*pair) for pair in pairs]
        error = statistics.stdev(lengths) / len(lengths) ** 0.5
        equal = sum(first == second for first, second in pairs) / len(pairs)
        places = statistics.mean(equal_places(*pair) for pair in pairs)
        print(
            f"{file.name} | {statistics.mean(lengths):.1f} ± {error:.1f} | {equal:.0%} | {places:.1%}",
            flush=True,
        )


def beginnings(text: str, count: int) -> list[str]:
    """Return `count` passages of BEGINNING_CHARS characters, spread evenly over the text, each from
    the beginning of a line.
    """
    passages = []
    for number in range(count):
        start = text.find("\n", number * (len(text) - 2 * BEGINNING_CHARS) // count) + 1
        passages.append(text[start : start + BEGINNING_CHARS].strip())
    return passages


def continuations(
    model: Path, prompts: Sequence[str], tokens: int, threads: int
) -> list[list[str]]:
    """Return the tokens, as text, with which a model continues each prompt."""
    bodies = [
        {"prompt": prompt, "max_tokens": tokens, "logprobs": 0, "ignore_eos": True}
        for prompt in prompts
    ]
    flags = ["-np", str(PARALLEL), "-t", str(threads)]
    responses = answer(model, "/v1/completions", bodies, flags)
    return [response["choices"][0]["logprobs"]["tokens"] for response in responses]


def equal_beginning(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the number of equal tokens until the first difference."""
    return next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )


def equal_places(first: Sequence[str], second: Sequence[str]) -> float:
    """Return the share of places at which both have the same token."""
    same = sum(a == b for a, b in zip(first, second, strict=False))
    return same / max(len(first), len(second), 1)


if __name__ == "__main__":
    main()
