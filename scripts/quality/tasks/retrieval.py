#!/usr/bin/env python3
"""Measure whether a model finds a fact in a long text, for several types of KV cache.

usage: .venv/bin/python scripts/quality/tasks/retrieval.py FILE.gguf ... --text FILE
       [--types f16,q8_0,q4_0] [--tokens 8000] [--places 8] [--threads 2]

A sentence with a random code is put between the paragraphs of the text, at --places places from the
beginning to the end, and the chat asks for the code. For each file and cache type the script prints
the share of answers that contain it, and the places at which it was not found. A type is that of K
and V, or names both: q8_0/q4_0.
"""

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from scripts.quality.tasks.answers import answer

TOKEN_CHARS = 3.9  # of English text: a little less than a token has, so that the text fits
ANSWER_TOKENS, MARGIN_TOKENS = 24, 600
VAULTS = ("amber", "cedar", "coral", "fern", "granite", "indigo", "juniper", "maple")
QUESTION = "What is the access code of the {vault} vault? Answer with the code alone."


def main() -> None:
    """Parse the flags, ask every file with every cache type and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--types", default="f16,q8_0,q4_0")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--places", type=int, default=8)
    parser.add_argument("-t", "--threads", type=int, default=2)
    args = parser.parse_args()
    text = args.text.read_text()[: int(args.tokens * TOKEN_CHARS)]
    cases = [case(text, number, args.places) for number in range(args.places)]
    bodies = [
        {"messages": [{"role": "user", "content": prompt}], "max_tokens": ANSWER_TOKENS}
        for prompt, _ in cases
    ]
    print("file | cache | found | not found at")
    for file in args.files:
        for kind in args.types.split(","):
            context = args.tokens + MARGIN_TOKENS
            flags = ["-np", "1", "-c", str(context), "-t", str(args.threads)]
            type_k, _, type_v = kind.partition("/")
            flags += ["-ctk", type_k, "-ctv", type_v or type_k]
            responses = answer(file, "/v1/chat/completions", bodies, flags)
            texts = [response["choices"][0]["message"]["content"] for response in responses]
            tokens = responses[0]["usage"]["prompt_tokens"]
            missed = [
                f"{number / max(1, args.places - 1):.0%}"
                for number, (found, (_, code)) in enumerate(zip(texts, cases, strict=True))
                if code not in found
            ]
            share = f"{args.places - len(missed)} of {args.places}"
            print(
                f"{file.name}, {tokens} tokens | {kind} | {share} | {', '.join(missed)}", flush=True
            )


def case(text: str, number: int, places: int) -> tuple[str, str]:
    """Return a prompt with a code at one of `places` places of the text, and the code."""
    rng = random.Random(number)
    vault, code = VAULTS[number % len(VAULTS)], str(rng.randrange(10**6, 10**7))
    at = text.rfind("\n", 0, int(len(text) * number / max(1, places - 1)) + 1) + 1
    fact = f"The access code of the {vault} vault is {code}.\n"
    return f"{text[:at]}{fact}{text[at:]}\n\n{QUESTION.format(vault=vault)}", code


if __name__ == "__main__":
    main()
