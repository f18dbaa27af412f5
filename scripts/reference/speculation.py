#!/usr/bin/env python3
"""Test by chi-square that speculative decoding samples from the model's distribution.

usage: .venv/bin/python scripts/reference/speculation.py [--samples 20000] [--tokens 6] [--guess 3]
       [--seed 0] [--ways model sure none]

The model is tests/data/stories260K in Q8_0, with temperature 1.2 and the 40 likeliest tokens. Each
sample has its own seed. The reference text is the greedy answer. Samples are counted in cells, by
the position at which a sample first differs from the reference and by its token there. The exact
probability of a cell in plain decoding is the product of the token probabilities up to that
position. Cells with fewer than five expected samples are merged. There are two ways to draft, and a
control:

- model: a draft model (the same one in Q4_0, so that it makes errors) samples tokens; a token is
  accepted with probability min(1, p/q)
- sure: the drafts are the reference's tokens; a token is accepted if the sampler chain draws the
  same one, as in prompt lookup
- none: plain decoding

The script prints chi-square, degrees of freedom and the p-value for each way, and exits with 1 if a
p-value is below 0.01.
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

from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.binding.placement.model_placement import ON_HOST
from llmcli.runtime.binding.rows.batch import BatchRows
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
MIN_EXPECTED, ALPHA = 5, 0.01
Cell = tuple[int, int]  # position of the first difference, and the token there; -1: no difference


def answer(engine: Engine, request: Request) -> tuple[list[int], int, int]:
    """Run a request. Return the tokens of its answer, the number of drafted tokens, and the number
    of accepted ones.
    """
    number = engine.submit(request)
    while engine.is_busy:
        engine.step()
    result = engine.pop_answer(number)
    return [token.id for token in result.tokens], result.n_drafted or 0, result.n_accepted


def exact_probabilities(
    context: Context, vocabulary: FakeVocabulary, prompt: tuple[int, ...], reference: list[int]
) -> dict[Cell, float]:
    """Return the exact probability of each cell, computed by passes over the reference text."""
    context.clear()
    chain = make_chain(WARM, 0, None, vocabulary)
    assert isinstance(chain, NumpyChain)
    probabilities: dict[Cell, float] = {}
    prefix_probability, tokens = 1.0, list(prompt)
    rows = context.decode(
        BatchRows(
            tokens, range(len(tokens)), [0] * len(tokens), [False] * (len(tokens) - 1) + [True]
        )
    )
    for position, token in enumerate(reference):
        token_probabilities = chain.probabilities(rows[0], tokens).astype(float)
        token_probabilities /= token_probabilities.sum()
        probabilities |= {
            (position, int(token_id)): prefix_probability * token_probabilities[token_id]
            for token_id in token_probabilities.nonzero()[0]
            if token_id != token
        }
        prefix_probability *= token_probabilities[token]
        tokens.append(token)
        rows = context.decode(BatchRows([token], [len(tokens) - 1], [0], [True]))
    probabilities[len(reference), -1] = prefix_probability
    context.clear()
    return probabilities


def first_difference(tokens: list[int], reference: list[int]) -> Cell:
    """Return the cell of a sample."""
    for position, (token, reference_token) in enumerate(zip(tokens, reference, strict=True)):
        if token != reference_token:
            return position, token
    return len(reference), -1


def chi_square(
    counts: Counter[Cell], probabilities: dict[Cell, float], samples: int
) -> tuple[float, int, float]:
    """Return the chi-square statistic, its degrees of freedom, and the p-value (by Wilson and
    Hilferty's approximation). `counts`, `probabilities`: observed samples and exact probability of
    each cell.
    """
    rare = sum(p for p in probabilities.values() if p * samples < MIN_EXPECTED)
    cells = [
        (counts[cell], p * samples)
        for cell, p in probabilities.items()
        if p * samples >= MIN_EXPECTED
    ]
    n_in_cells = sum(count for count, _ in cells)
    cells.append((samples - n_in_cells, max(rare * samples, 1e-9)))
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    degrees_of_freedom = len(cells) - 1
    z = (
        (statistic / degrees_of_freedom) ** (1 / 3) - (1 - 2 / (9 * degrees_of_freedom))
    ) / math.sqrt(2 / (9 * degrees_of_freedom))
    return statistic, degrees_of_freedom, 0.5 * math.erfc(z / math.sqrt(2))


def engines(
    stack: ExitStack, model: Model, context: Context, small: Path, reference: list[int], guess: int
) -> Iterator[tuple[str, Engine]]:
    """Yield the name of each way to draft with an engine that uses it, over the emptied context.
    `small`: file of the draft model. `guess`: the largest number of drafted tokens per pass.
    """
    vocabulary = FakeVocabulary(model.piece, lambda token: False, model.n_vocab)
    draft = stack.enter_context(open_model(small, ON_HOST))
    options = ContextOptions(256, n_outputs=4)
    drafter = DraftModel(stack.enter_context(open_context(draft, options)), vocabulary, 0.001, 0.0)
    drafters: dict[str, Drafter | None] = {
        "model": drafter,
        "sure": Knowing(reference, chance=0.99, n_vocab=model.n_vocab),
        "none": None,
    }
    for name, drafter_of_way in drafters.items():
        context.clear()
        yield (
            name,
            Engine(
                context,
                vocabulary,
                None,
                Speculation((drafter_of_way,) if drafter_of_way else (), Steady(CHEAP), guess + 1),
            ),
        )


def with_seed(sampling: Sampling, seed: int) -> Sampling:
    """Return the sampling settings with another seed."""
    return sampling.with_values({"seed": seed})


def main() -> int:
    """Parse the flags, sample, count and print; return 1 if a p-value is below 0.01."""
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
    args = parser.parse_args()
    worst = 1.0
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        files = {kind: Path(temporary) / f"stories-{kind}.gguf" for kind in ("Q8_0", "Q4_0")}
        for kind, file in files.items():
            write.write_model(
                plan.plan_quantization(checkpoint_source.open_checkpoint(STORIES), kind),
                file,
                threads=1,
            )
        model = stack.enter_context(open_model(files["Q8_0"], ON_HOST))
        context = stack.enter_context(open_context(model, ContextOptions(256, n_outputs=16)))
        vocabulary = FakeVocabulary(model.piece, lambda token: False, model.n_vocab)
        prompt = tuple(model.tokenize(TEXT, special=False, add_special=True))
        greedy = Request(
            prompt, default_sampling().with_values({"temp": 0}), max_tokens=args.tokens
        )
        reference, _, _ = answer(Engine(context, vocabulary, None), greedy)
        probabilities = exact_probabilities(context, vocabulary, prompt, reference)
        for name, engine in engines(stack, model, context, files["Q4_0"], reference, args.guess):
            if name not in args.ways:
                continue
            counts: Counter[Cell] = Counter()
            drafted = accepted = 0
            for number in range(args.samples):
                sampling = with_seed(WARM, args.seed + number)
                request = Request(prompt, sampling, max_tokens=args.tokens, strategy="speculative")
                tokens, n_drafted, n_accepted = answer(engine, request)
                counts[first_difference(tokens, reference)] += 1
                drafted, accepted = drafted + n_drafted, accepted + n_accepted
            engine.ledger.check()
            statistic, degrees_of_freedom, p = chi_square(counts, probabilities, args.samples)
            worst = min(worst, p)
            print(
                f"{name:5}  {args.samples} samples, {drafted} drafted, {accepted / max(1, drafted):.0%} accepted: "
                f"chi-square {statistic:.1f} at {degrees_of_freedom} degrees of freedom, p {p:.3f}",
                flush=True,
            )
    return int(worst < ALPHA)


if __name__ == "__main__":
    sys.exit(main())
