#!/usr/bin/env python3
"""Test by chi-square that speculative decoding samples from the model's distribution.

usage: .venv/bin/python scripts/reference/speculation.py [--samples 20000] [--tokens 6] [--guess 3]
       [--seed 0] [--ways model sure pool lookahead mtp mtp-hybrid none]

The model is tests/data/stories260K in Q8_0, and for mtp a tiny random model with a prediction layer
(DeepSeek V3, and the hybrid Qwen3.5; needs torch and transformers). The temperature is 1.2, with the
40 likeliest tokens. Each sample has its own seed. The reference text is the greedy answer. Samples
are counted in cells, by the position at which a sample first differs from the reference and by its
token there. The exact probability of a cell in plain decoding is the product of the token
probabilities up to that position. Cells with fewer than five expected samples are merged. The ways
to draft, and a control:

- model: a draft model (the same one in Q4_0, so that it makes errors) samples tokens; a token is
  accepted with probability min(1, p/q)
- sure: the drafts are the reference's tokens; a token is accepted if the sampler chain draws the
  same one, as in prompt lookup
- pool: the drafts are what earlier samples continued with
- lookahead: the drafts are the predictions of the last pass
- mtp, mtp-hybrid: the prediction layers sample tokens, as the draft model does
- none: plain decoding

The script prints chi-square, degrees of freedom and the p-value for each way, and exits with 1 if a
p-value is below 0.01, divided by the number of ways.
"""

import argparse
import math
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context, open_prediction_context
from llmcli.runtime.binding.contexts.prediction_context import prediction_options
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.binding.placement.model_placement import ON_HOST
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.drafting.acceptance import Acceptance
from llmcli.runtime.drafting.base import Drafter, DrafterResources
from llmcli.runtime.drafting.draft_model import DraftModel
from llmcli.runtime.drafting.lookahead import LookaheadDrafter
from llmcli.runtime.drafting.mtp import PredictionDrafter
from llmcli.runtime.drafting.ngram_pool import PoolDrafter, PoolDrafts
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
PREDICTING = {"mtp": "DeepseekV3ForCausalLM", "mtp-hybrid": "Qwen3_5ForCausalLM"}
WAYS = ("model", "sure", "pool", "lookahead", *PREDICTING, "none")
Cell = tuple[int, int]  # position of the first difference, and the token there; -1: no difference


@dataclass
class Opened:
    """A model with its context, the prompt, the greedy answer and the exact probabilities."""

    context: Context
    vocabulary: FakeVocabulary
    prompt: tuple[int, ...]
    reference: list[int]
    probabilities: dict[Cell, float]

    def engine(self, drafter: Drafter | None, guess: int) -> Engine:
        """Return an engine with a drafter, over the emptied context."""
        self.context.clear()
        speculation = Speculation((drafter,) if drafter else (), Steady(CHEAP), guess + 1)
        return Engine(self.context, self.vocabulary, None, speculation)


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


class Sure(Acceptance):
    """Chances with which every draft is worth its time."""

    def chances(self, count: int) -> list[float]:
        return [0.99] * count


def stories_engine(
    stack: ExitStack, way: str, opened: Opened, files: dict[str, Path], guess: int
) -> Engine:
    """Return an engine that drafts in one of the ways of the stories model. `guess`: the largest
    number of drafted tokens per pass.
    """
    vocabulary = opened.vocabulary
    drafter: Drafter | None = None
    resources = DrafterResources(vocabulary, uses_pool=True, uses_lookahead=True)
    if way == "model":
        draft = stack.enter_context(open_model(files["Q4_0"], ON_HOST))
        options = ContextOptions(256, n_outputs=4)
        drafter = DraftModel(
            stack.enter_context(open_context(draft, options)), vocabulary, 0.001, 0.0
        )
    elif way == "sure":
        drafter = Knowing(opened.reference, chance=0.99, n_vocab=opened.context.n_vocab)
    elif way == "pool":
        drafter = SurePool()
    elif way == "lookahead":
        drafter = LookaheadDrafter.create(resources)
        assert isinstance(drafter, LookaheadDrafter)
        drafter.acceptance = Sure()
    return opened.engine(drafter, guess)


class SurePool(PoolDrafter):
    """A pool whose drafts are always worth their time."""

    def start(self, request: Request, seed: int) -> PoolDrafts:
        drafts = super().start(request, seed)
        drafts.pool.acceptance = Sure()
        return drafts


def open_sampled(context: Context, model: Model, prompt: tuple[int, ...], n_tokens: int) -> Opened:
    """Return a model with its greedy answer of `n_tokens` tokens."""
    vocabulary = FakeVocabulary(model.piece, lambda token: False, model.n_vocab)
    greedy = Request(prompt, default_sampling().with_values({"temp": 0}), max_tokens=n_tokens)
    reference, _, _ = answer(Engine(context, vocabulary, None), greedy)
    probabilities = exact_probabilities(context, vocabulary, prompt, reference)
    return Opened(context, vocabulary, prompt, reference, probabilities)


def open_predicting(
    stack: ExitStack, hf: str, folder: Path, n_tokens: int, guess: int
) -> tuple[Opened, Engine]:
    """Return a tiny random model with a prediction layer, and an engine that drafts with it."""
    from tests.quant import predicting_checkpoint

    predicting_checkpoint.build(hf, folder / "tiny")
    source = checkpoint_source.open_checkpoint(folder / "tiny")
    write.write_model(plan.plan_quantization(source, "Q8_0"), folder / "tiny.gguf", threads=1)
    model = stack.enter_context(open_model(folder / "tiny.gguf", ON_HOST, load_mtp=True))
    options = ContextOptions(256, n_outputs=16, n_rs_seq=guess, outputs_states=True)
    context = stack.enter_context(open_context(model, options))
    prediction = stack.enter_context(
        open_prediction_context(model, context, prediction_options(options))
    )
    opened = open_sampled(context, model, tuple(range(7, 17)), n_tokens)
    drafter = PredictionDrafter(context, prediction, opened.vocabulary)
    drafter.acceptance = Sure()
    return opened, opened.engine(drafter, guess)


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
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    args = parser.parse_args()
    worst = 1.0
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        files = {kind: Path(temporary) / f"stories-{kind}.gguf" for kind in ("Q8_0", "Q4_0")}
        for kind, file in files.items():
            source = checkpoint_source.open_checkpoint(STORIES)
            write.write_model(plan.plan_quantization(source, kind), file, threads=1)
        model = stack.enter_context(open_model(files["Q8_0"], ON_HOST))
        context = stack.enter_context(open_context(model, ContextOptions(256, n_outputs=16)))
        prompt = tuple(model.tokenize(TEXT, special=False, add_special=True))
        stories = open_sampled(context, model, prompt, args.tokens)
        for way in args.ways:
            if way in PREDICTING:
                folder = Path(temporary) / way
                folder.mkdir()
                opened, engine = open_predicting(
                    stack, PREDICTING[way], folder, args.tokens, args.guess
                )
            else:
                opened = stories
                engine = stories_engine(stack, way, stories, files, args.guess)
            worst = min(worst, sample(way, opened, engine, args))
    return int(worst < ALPHA / len(args.ways))


def sample(way: str, opened: Opened, engine: Engine, args: argparse.Namespace) -> float:
    """Draw and count the samples of one way, print a line, and return the p-value."""
    counts: Counter[Cell] = Counter()
    drafted = accepted = 0
    for number in range(args.samples):
        sampling = with_seed(WARM, args.seed + number)
        request = Request(
            opened.prompt, sampling, max_tokens=args.tokens, strategy="speculative", ignore_eos=True
        )
        tokens, n_drafted, n_accepted = answer(engine, request)
        counts[first_difference(tokens, opened.reference)] += 1
        drafted, accepted = drafted + n_drafted, accepted + n_accepted
    engine.ledger.check()
    statistic, degrees_of_freedom, p = chi_square(counts, opened.probabilities, args.samples)
    print(
        f"{way:10}  {args.samples} samples, {drafted} drafted, "
        f"{accepted / max(1, drafted):.0%} accepted: chi-square {statistic:.1f} at "
        f"{degrees_of_freedom} degrees of freedom, p {p:.3f}",
        flush=True,
    )
    return p


if __name__ == "__main__":
    sys.exit(main())
