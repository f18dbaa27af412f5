#!/usr/bin/env python3
"""Test by chi-square that speculative decoding samples from the model's distribution.

usage: .venv/bin/python scripts/reference/speculation.py [--samples 20000] [--tokens 6] [--guess 3]
       [--seed 0] [--ways WAY ...]

The model is tests/data/stories260K in Q8_0. For mtp it is a tiny random model with a prediction
layer (DeepSeek V3, and the hybrid Qwen3.5; needs torch and transformers), and for eagle3 a tiny
random Llama with a random draft. The temperature is 1.2, with the 40 likeliest tokens. The random
models choose among five tokens, so that their drafts are often right. Each sample has its own seed. The reference text is the greedy answer. Samples
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
- medusa: the drafts are the likeliest tokens of heads that guess the model's own next token
- mtp, mtp-hybrid, eagle3: the layers sample tokens, as the draft model does
- model-tree, mtp-tree, eagle3-tree: trees of TREE_GUESSES sampled tokens, several after one
- medusa-tree, lookahead-tree: trees of the same guesses; lookahead's window
- joint: the draft model's trees, with free guesses of prompt lookup in the same pass
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
from llmcli.runtime.binding.contexts.eagle_context import LayerInputs
from llmcli.runtime.binding.contexts.open_context import (
    open_context,
    open_eagle_context,
    open_prediction_context,
)
from llmcli.runtime.binding.contexts.prediction_context import prediction_options
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.binding.placement.model_placement import ON_HOST
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.drafting.base import Drafter
from llmcli.runtime.drafting.draft_contexts import eagle_context_options
from llmcli.runtime.drafting.draft_files.eagle3_match import count_layers, read_layers
from llmcli.runtime.drafting.draft_files.head_graph import open_heads
from llmcli.runtime.drafting.draft_files.heads_file import MEDUSA, HeadShapes, read_heads
from llmcli.runtime.drafting.draft_model import DraftModel, ModelDrafts
from llmcli.runtime.drafting.eagle3 import EagleDrafter
from llmcli.runtime.drafting.gain.acceptance import Acceptance
from llmcli.runtime.drafting.heads import HeadDrafter
from llmcli.runtime.drafting.hidden_state_drafter import HiddenStateDrafter
from llmcli.runtime.drafting.lookahead import LookaheadDrafter
from llmcli.runtime.drafting.mtp import PredictionDrafter
from llmcli.runtime.drafting.ngram import NgramDrafts, PromptLookup
from llmcli.runtime.drafting.ngram_pool import PoolDrafter
from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.requests.request import Request
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.sampling import Sampling, default_sampling
from llmcli.runtime.sampling.chain import NumpyChain, make_chain
from llmcli.runtime.strategies.base import Speculation
from quant.convert import checkpoint_source
from quant.model_file.read_header import read_header
from quant.quantize import plan, write
from tests.fixtures.draft_heads import write_heads
from tests.fixtures.drafts import CHEAP, Knowing, Steady
from tests.fixtures.fakes import FakeVocabulary

STORIES = Path(__file__).parents[2] / "tests" / "data" / "stories260K"
TEXT = "Once upon a time, there was a"
WARM = default_sampling().with_values({"temp": 1.2, "top_p": 1, "min_p": 0})
FIVE_TOKENS = WARM.with_values({"logit_bias": tuple(f"{token}+100" for token in range(20, 25))})
MIN_EXPECTED, ALPHA = 5, 0.01
PREDICTING = {
    "mtp": "DeepseekV3ForCausalLM",
    "mtp-tree": "DeepseekV3ForCausalLM",
    "mtp-hybrid": "Qwen3_5ForCausalLM",
}
EAGLE = ("eagle3", "eagle3-tree")
WAYS = (
    *("model", "model-tree", "joint", "sure", "pool", "lookahead", "lookahead-tree"),
    *("medusa", "medusa-tree", *PREDICTING, *EAGLE, "none"),
)
TREE_GUESSES, LOOKAHEAD_GUESSES = 11, 15
TREE_CHANCES = (0.5, 0.25, 0.15, 0.1)  # by rank
N_BRANCHES = 14
Cell = tuple[int, int]  # position of the first difference, and the token there; -1: no difference


@dataclass
class Opened:
    """A model with its context, the prompt, the greedy answer and the exact probabilities."""

    context: Context
    vocabulary: FakeVocabulary
    prompt: tuple[int, ...]
    reference: list[int]
    probabilities: dict[Cell, float]
    sampling: Sampling

    def engine(self, *drafters: Drafter, guess: int, max_branches: int = 1) -> Engine:
        """Return an engine with drafters, over the emptied context."""
        self.context.clear()
        speculation = Speculation(
            drafters, Steady(CHEAP), guess + 1, takes_longest=True, max_branches=max_branches
        )
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
    context: Context,
    vocabulary: FakeVocabulary,
    prompt: tuple[int, ...],
    reference: list[int],
    sampling: Sampling,
) -> dict[Cell, float]:
    """Return the exact probability of each cell, computed by passes over the reference text."""
    context.clear()
    chain = make_chain(sampling, 0, None, vocabulary)
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
    """Chances with which the largest draft is made, and a tree has guesses of several ranks."""

    def chances(self, n_depths: int, n_ranks: int = 1) -> list[list[float]]:
        return [list(TREE_CHANCES[:n_ranks])] * n_depths


def stories_engine(
    stack: ExitStack, way: str, opened: Opened, files: dict[str, Path], guess: int
) -> Engine:
    """Return an engine that drafts in one of the ways of the stories model. `guess`: the largest
    number of drafted tokens per pass.
    """
    vocabulary = opened.vocabulary
    drafters: list[Drafter] = []
    if way in ("model", "model-tree", "joint"):
        draft = stack.enter_context(open_model(files["Q4_0"], ON_HOST))
        context = stack.enter_context(open_context(draft, ContextOptions(256, n_outputs=4)))
        kind = ShortDraftModel if way == "joint" else DraftModel
        drafters.append(kind(context, vocabulary, 0.001, 0.0))
        if way == "joint":
            drafters.append(SureLookup())
    elif way == "sure":
        drafters.append(Knowing(opened.reference, n_vocab=opened.context.n_vocab))
    elif way == "pool":
        drafters.append(PoolDrafter())
    elif way.startswith("lookahead"):
        drafters.append(LookaheadDrafter())
    elif way.startswith("medusa"):
        header = read_header(files["Q8_0"])
        heads = stack.enter_context(open_heads(read_heads(read_header(files["heads"])), header, 1))
        drafters.append(HeadDrafter(opened.context, heads))
    for drafter in drafters:
        if hasattr(drafter, "acceptance"):
            drafter.acceptance = Sure()
    if way == "lookahead-tree":
        guess = LOOKAHEAD_GUESSES
    elif way.endswith("-tree") or way == "joint":
        guess = TREE_GUESSES
    max_branches = opened.context.max_branches if guess >= TREE_GUESSES else 1
    return opened.engine(*drafters, guess=guess, max_branches=max_branches)


class ShortDraftModel(DraftModel):
    """A draft model whose trees leave room for two rows."""

    def start(self, request: Request, seed: int) -> ModelDrafts:
        drafts = super().start(request, seed)
        find_shape = drafts.shape
        drafts.shape = lambda limits: find_shape(limits).shorten(5)  # type: ignore[method-assign]
        return drafts


class SureLookup(PromptLookup):
    """Prompt lookup that guesses the first tokens of the text, whatever the last ones are."""

    def start(self, request: Request, seed: int) -> NgramDrafts:
        drafts = super().start(request, seed)
        follow = drafts.follow

        def follow_first(sequence: Sequence) -> None:
            follow(sequence)
            drafts.source, drafts.length = 1, 3

        drafts.follow = follow_first  # type: ignore[method-assign]
        return drafts


def open_sampled(
    context: Context,
    model: Model,
    prompt: tuple[int, ...],
    n_tokens: int,
    sampling: Sampling = WARM,
) -> Opened:
    """Return a model with its greedy answer of `n_tokens` tokens."""
    vocabulary = FakeVocabulary(model.piece, lambda token: False, model.n_vocab)
    greedy = Request(prompt, sampling.with_values({"temp": 0}), max_tokens=n_tokens)
    reference, _, _ = answer(Engine(context, vocabulary, None), greedy)
    probabilities = exact_probabilities(context, vocabulary, prompt, reference, sampling)
    return Opened(context, vocabulary, prompt, reference, probabilities, sampling)


def open_predicting(
    stack: ExitStack, way: str, folder: Path, n_tokens: int, guess: int
) -> tuple[Opened, Engine]:
    """Return a tiny random model with a prediction layer, and an engine that drafts with it."""
    from tests.quant import predicting_checkpoint

    file = predicting_checkpoint.write_gguf(folder / "tiny.gguf", "Q8_0", PREDICTING[way])
    model = stack.enter_context(open_model(file, ON_HOST, load_mtp=True))
    is_tree = way.endswith("-tree")
    options = ContextOptions(
        256,
        n_outputs=16,
        n_rs_seq=guess,
        outputs_states=True,
        n_branches=N_BRANCHES if is_tree else 0,
    )
    context = stack.enter_context(open_context(model, options))
    prediction = stack.enter_context(
        open_prediction_context(model, context, prediction_options(options))
    )
    opened = open_sampled(context, model, tuple(range(7, 17)), n_tokens, FIVE_TOKENS)
    drafter = PredictionDrafter(context, prediction, opened.vocabulary)
    return opened, start_engine(opened, drafter, is_tree, guess)


def open_eagle(
    stack: ExitStack, way: str, folder: Path, n_tokens: int, guess: int
) -> tuple[Opened, Engine]:
    """Return a tiny random Llama, and an engine that drafts with a random EAGLE-3 draft."""
    from tests.quant import tiny_gguf

    target = tiny_gguf.llama(folder / "target.gguf", hidden=64, ff=128, layers=6)
    file = tiny_gguf.eagle3(folder / "draft.gguf")
    header, draft_header = read_header(target), read_header(file)
    model = stack.enter_context(open_model(target, ON_HOST))
    options = ContextOptions(256, n_outputs=16, n_branches=N_BRANCHES)
    context = stack.enter_context(open_context(model, options))
    layers = read_layers(draft_header)
    inputs = LayerInputs(context, layers, count_layers(header), context.n_embd)
    draft = stack.enter_context(open_model(file, ON_HOST.for_header(draft_header)))
    eagle = stack.enter_context(open_eagle_context(draft, inputs, eagle_context_options(options)))
    opened = open_sampled(context, model, tuple(range(7, 17)), n_tokens, FIVE_TOKENS)
    drafter = EagleDrafter(eagle, opened.vocabulary)
    return opened, start_engine(opened, drafter, way.endswith("-tree"), guess)


def start_engine(opened: Opened, drafter: HiddenStateDrafter, is_tree: bool, guess: int) -> Engine:
    """Return an engine that always drafts with layers that read hidden states."""
    drafter.acceptance = Sure()
    return opened.engine(
        drafter,
        guess=TREE_GUESSES if is_tree else guess,
        max_branches=opened.context.max_branches if is_tree else 1,
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
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    args = parser.parse_args()
    worst = 1.0
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        files = {kind: folder / f"stories-{kind}.gguf" for kind in ("Q8_0", "Q4_0")}
        for kind, file in files.items():
            source = checkpoint_source.open_checkpoint(STORIES)
            write.write_model(plan.plan_quantization(source, kind), file, threads=1)
        header = read_header(files["Q8_0"])
        files["heads"] = folder / "heads.gguf"
        shapes = HeadShapes(MEDUSA, header.get_int("embedding_length") or 0, 512, 3, 1, 0, False)
        write_heads(files["heads"], shapes, files["Q8_0"], scale=0.0)
        model = stack.enter_context(open_model(files["Q8_0"], ON_HOST))
        options = ContextOptions(
            256, n_outputs=16, n_branches=N_BRANCHES, outputs_final_states=True
        )
        context = stack.enter_context(open_context(model, options))
        prompt = tuple(model.tokenize(TEXT, special=False, add_special=True))
        stories = open_sampled(context, model, prompt, args.tokens)
        for way in args.ways:
            if way in PREDICTING or way in EAGLE:
                (folder / way).mkdir()
                open_tiny = open_eagle if way in EAGLE else open_predicting
                opened, engine = open_tiny(stack, way, folder / way, args.tokens, args.guess)
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
        sampling = with_seed(opened.sampling, args.seed + number)
        request = Request(
            opened.prompt, sampling, max_tokens=args.tokens, strategy="speculative", ignore_eos=True
        )
        tokens, n_drafted, n_accepted = answer(engine, request)
        counts[first_difference(tokens, opened.reference)] += 1
        drafted, accepted = drafted + n_drafted, accepted + n_accepted
    engine.ledger.check()
    statistic, degrees_of_freedom, p = chi_square(counts, opened.probabilities, args.samples)
    print(
        f"{way:14}  {args.samples} samples, {drafted} drafted, "
        f"{accepted / max(1, drafted):.0%} accepted: chi-square {statistic:.1f} at "
        f"{degrees_of_freedom} degrees of freedom, p {p:.3f}",
        flush=True,
    )
    return p


if __name__ == "__main__":
    sys.exit(main())
