#!/usr/bin/env python3
"""Test that speculative decoding samples the model's distribution: chi-square against exact
probabilities.

usage: .venv/bin/python scripts/reference/speculation.py [--samples 20000] [--tokens 6] [--guess 3]
       [--seed 0] [--ways model sure none]

The model is tests/data/stories260K in Q8_0, at temperature 1.2 with the 40 likeliest tokens; each
sample has its own seed. The reference text is the greedy one. A sample counts by the position at
which it first differs from the reference, and by its token there. The exact probability of plain
decoding is the product of the probabilities up to that position. Cells with fewer than five
expected samples are merged. There are two ways to draft, and a control:

- model: a draft model (the same one in Q4_0, so that it makes errors) samples; drafts are accepted
  with min(1, p/q)
- sure: drafts are the reference's tokens, accepted if the chain draws the same (as for prompt
  lookup)
- none: plain decoding

The script prints chi-square, degrees of freedom and p for each way, and exits with 1 if a p is
below 0.01.
"""

import argparse
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from llmcli.runtime.binding.batch import BatchRows
from llmcli.runtime.binding.context import Context
from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.binding.open_context import open_context
from llmcli.runtime.drafting.base import Drafter
from llmcli.runtime.drafting.draft_model import DraftModel
from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.requests.request import Request
from llmcli.runtime.sampling import Sampling, default_sampling
from llmcli.runtime.sampling.chain import NumpyChain, make_chain
from llmcli.runtime.strategies.base import Speculation
from quant.convert import checkpoint_source
from quant.quantize import plan, write
from tests.fixtures.drafts import CHEAP, Knowing, Steady
from tests.fixtures.fakes import FakeVocabulary

STORIES = Path(__file__).parents[2] / "tests" / "data" / "stories260K"
TEXT = "Once upon a time, there was a"
WARM = default_sampling().with_values({"temp": 1.2, "top_p": 1, "min_p": 0})
LEAST, ALPHA = 5, 0.01
Cell = tuple[int, int]  # position of the first difference and its token; -1: none


def answer(engine: Engine, request: Request) -> tuple[list[int], int, int]:
    """Return the tokens, the number of drafted ones, and the number of accepted ones."""
    number = engine.submit(request)
    while engine.is_busy:
        engine.step()
    made = engine.pop_answer(number)
    return [token.id for token in made.tokens], made.n_drafted or 0, made.n_accepted


def expected(
    context: Context, words: FakeVocabulary, prompt: tuple[int, ...], reference: list[int]
) -> dict[Cell, float]:
    """Return the exact probability of each first difference from the reference."""
    context.clear()
    chain = make_chain(WARM, 0, None, words)
    assert isinstance(chain, NumpyChain)
    found: dict[Cell, float] = {}
    way, tokens = 1.0, list(prompt)
    rows = context.decode(
        BatchRows(
            tokens, range(len(tokens)), [0] * len(tokens), [False] * (len(tokens) - 1) + [True]
        )
    )
    for place, token in enumerate(reference):
        odds = chain.probabilities(rows[0], tokens).astype(float)
        odds /= odds.sum()
        found |= {
            (place, int(other)): way * odds[other] for other in odds.nonzero()[0] if other != token
        }
        way *= odds[token]
        tokens.append(token)
        rows = context.decode(BatchRows([token], [len(tokens) - 1], [0], [True]))
    found[len(reference), -1] = way
    context.clear()
    return found


def departure(tokens: list[int], reference: list[int]) -> Cell:
    """Return the first difference of a sample."""
    for place, (one, other) in enumerate(zip(tokens, reference, strict=True)):
        if one != other:
            return place, one
    return len(reference), -1


def chi_square(
    seen: Counter[Cell], odds: dict[Cell, float], samples: int
) -> tuple[float, int, float]:
    """Return the statistic, its degrees of freedom, and p (Wilson and Hilferty's approximation)."""
    rare = sum(p for p in odds.values() if p * samples < LEAST)
    pairs = [(seen[cell], p * samples) for cell, p in odds.items() if p * samples >= LEAST]
    known = sum(count for count, _ in pairs)
    pairs.append((samples - known, max(rare * samples, 1e-9)))
    statistic = sum((count - mean) ** 2 / mean for count, mean in pairs)
    free = len(pairs) - 1
    z = ((statistic / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))
    return statistic, free, 0.5 * math.erfc(z / math.sqrt(2))


def engines(
    stack: ExitStack, model: Model, context: Context, small: Path, reference: list[int], guess: int
) -> Iterator[tuple[str, Engine]]:
    """Yield an engine with an empty context for each way to draft."""
    words = FakeVocabulary(model.piece, lambda token: False, model.n_vocab)
    draft = stack.enter_context(open_model(small, gpu_layers=0))
    options = ContextOptions(256, n_outputs=4)
    drafter = DraftModel(stack.enter_context(open_context(draft, options)), words, 0.001, 0.0)
    ways: dict[str, Drafter | None] = {
        "model": drafter,
        "sure": Knowing(reference, chance=0.99, n_vocab=model.n_vocab),
        "none": None,
    }
    for name, made in ways.items():
        context.clear()
        yield (
            name,
            Engine(
                context, words, None, Speculation((made,) if made else (), Steady(CHEAP), guess + 1)
            ),
        )


def seeded(sampling: Sampling, seed: int) -> Sampling:
    """Return the settings with another seed."""
    return sampling.with_values({"seed": seed})


def main() -> int:
    """Sample, count and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--guess", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--ways", nargs="+", default=["model", "sure", "none"], choices=("model", "sure", "none")
    )
    asked = parser.parse_args()
    worst = 1.0
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        files = {kind: Path(place) / f"stories-{kind}.gguf" for kind in ("Q8_0", "Q4_0")}
        for kind, file in files.items():
            write.write_model(
                plan.plan_quantization(checkpoint_source.open_checkpoint(STORIES), kind),
                file,
                threads=1,
            )
        model = stack.enter_context(open_model(files["Q8_0"], gpu_layers=0))
        context = stack.enter_context(open_context(model, ContextOptions(256, n_outputs=16)))
        words = FakeVocabulary(model.piece, lambda token: False, model.n_vocab)
        prompt = tuple(model.tokenize(TEXT, special=False, add_special=True))
        greedy = Request(
            prompt, default_sampling().with_values({"temp": 0}), max_tokens=asked.tokens
        )
        reference, _, _ = answer(Engine(context, words, None), greedy)
        odds = expected(context, words, prompt, reference)
        for name, engine in engines(stack, model, context, files["Q4_0"], reference, asked.guess):
            if name not in asked.ways:
                continue
            seen: Counter[Cell] = Counter()
            drafted = accepted = 0
            for number in range(asked.samples):
                sampling = seeded(WARM, asked.seed + number)
                request = Request(prompt, sampling, max_tokens=asked.tokens, strategy="speculative")
                tokens, more, right = answer(engine, request)
                seen[departure(tokens, reference)] += 1
                drafted, accepted = drafted + more, accepted + right
            engine.ledger.check()
            statistic, free, p = chi_square(seen, odds, asked.samples)
            worst = min(worst, p)
            print(
                f"{name:5}  {asked.samples} samples, {drafted} drafted, {accepted / max(1, drafted):.0%} accepted: "
                f"chi-square {statistic:.1f} at {free} degrees of freedom, p {p:.3f}",
                flush=True,
            )
    return int(worst < ALPHA)


if __name__ == "__main__":
    sys.exit(main())
