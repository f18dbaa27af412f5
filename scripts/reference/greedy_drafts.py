#!/usr/bin/env python3
"""Compare greedy answers with drafts of each method to those of plain decoding.

usage: .venv/bin/python scripts/reference/greedy_drafts.py MODEL.gguf [--prompts 50] [--tokens 48]
       [--model-draft DRAFT.gguf] [--heads HEADS.gguf ...] [--cache q8_0] [-t N] [--ways WAY ...]

The prompts are the tasks of `llmcli bench spec` and the questions of
../shared/assets/prompts/vicuna_bench_question.jsonl. Every draft is as long as possible, whatever it
costs; WAY-tree drafts trees. With a --cache of quantized type and quantized weights, a row of a pass
has the logits of a pass by itself, and paths give equal texts. Otherwise, and in trees, the last bits
of logits differ, and an answer may go another way where two tokens are almost equally likely. For
each way the script prints how many answers are equal, and the largest difference of the
log-probabilities of the two tokens at which an answer leaves the plain one. The exit code is 1 if
this difference is above MAX_TIE.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from llmcli.bench.spec.task_kinds import TASK_NAMES, load_task_kind
from llmcli.runtime.draft_settings import NO_DRAFTING, DraftSettings
from llmcli.runtime.drafting.base import Drafter, DraftState
from llmcli.runtime.drafting.draft_files.heads_file import read_heads
from llmcli.runtime.drafting.draft_model import DraftModel
from llmcli.runtime.kv_cache.common_prefix import common_prefix
from llmcli.runtime.requests.request import Answer, Request, RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import default_sampling
from llmcli.types import Message
from quant.model_file.read_header import read_header

QUESTIONS = (
    Path(__file__).parents[3] / "shared" / "assets" / "prompts" / "vicuna_bench_question.jsonl"
)
GREEDY = default_sampling().with_values({"temp": 0})
# Of log-probabilities. Between passes of other shapes, logits of a 4-bit model differ by more.
MAX_TIE = 0.5
COUNTS = ("n_drafted", "n_accepted")
JOINT, JOINT_NODES = "joint-tree", 5  # of the draft model, which leave room for two others


def load_prompts(count: int) -> list[str]:
    """Return the first `count` prompts."""
    tasks = [prompt for name in TASK_NAMES for prompt in load_task_kind(name).prompts]
    lines = QUESTIONS.read_text().splitlines()
    found = [*tasks, *(json.loads(line)["turns"][0] for line in lines)][:count]
    assert len(found) == count, f"there are only {len(found)} prompts"
    return found


def answer(runner: Runner, prompt: str, n_tokens: int, strategy: str) -> Answer:
    """Return the greedy answer to a prompt, from an empty cache."""
    runner.engine.ledger.evict_idle()
    request = Request(
        tuple(runner.encode_chat([Message("user", prompt)])),
        GREEDY,
        max_tokens=n_tokens,
        strategy=strategy,
        ignore_eos=True,
        top_logprobs=20 if strategy == "plain" else 0,
        logprobs=strategy == "plain",
    )
    stream = runner.reply(request)
    list(stream)
    runner.engine.check()
    return stream.answer


def list_ways(args: argparse.Namespace) -> Iterator[tuple[str, DraftSettings]]:
    """Yield the ways to draft, and their settings."""
    for method in ("ngram", "pool", "lookahead"):
        yield method, DraftSettings(method=method, measures=True)
    yield "lookahead-tree", DraftSettings(method="lookahead", measures=True)
    if args.model_draft:
        for way in ("model", "model-tree"):
            yield way, DraftSettings(method="model", model=args.model_draft, measures=True)
        yield JOINT, DraftSettings(ngram="on", model=args.model_draft, measures=True)
    for file in args.heads:
        heads = read_heads(read_header(file))
        method = heads.shapes.method
        for way in (method, f"{method}-tree"):
            yield way, DraftSettings(method=method, heads=heads, measures=True)


def joint_drafters(drafters: tuple[Drafter, ...]) -> tuple[Drafter, ...]:
    """Return the draft model with short trees first, so that n-grams are added to them."""
    (model,) = (drafter for drafter in drafters if isinstance(drafter, DraftModel))
    start = model.start

    def start_short(request: Request, seed: int) -> DraftState:
        drafts = start(request, seed)
        find_shape = drafts.shape
        drafts.shape = lambda limits: find_shape(limits).shorten(JOINT_NODES)  # type: ignore[method-assign]
        return drafts

    model.start = start_short  # type: ignore[assignment, method-assign]
    return (model, *(drafter for drafter in drafters if drafter is not model))


def open_drafting(
    args: argparse.Namespace, drafting: DraftSettings
) -> AbstractContextManager[Runner]:
    """Return a context manager of a runner."""
    options = RunOptions(
        ctx_size=2048, threads=args.threads, cache_type_k=args.cache, cache_type_v=args.cache
    )
    return open_runner(args.model, options, drafting=drafting)


def tie(plain: Answer, found: Answer) -> float | None:
    """Return the difference of the log-probabilities of the first different tokens in the plain
    answer, or None if the answers are equal.
    """
    texts = [[token.id for token in each.tokens] for each in (plain, found)]
    if texts[0] == texts[1]:
        return None
    at = common_prefix(*texts)
    if at in map(len, texts):
        return float("inf")
    scores = {one.token: one.logprob for one in plain.top_logprobs[at]}
    return scores[texts[0][at]] - scores.get(texts[1][at], -float("inf"))


def main() -> int:
    """Parse the flags, answer and compare; return 1 if an answer differs without a near tie."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--model-draft", type=Path)
    parser.add_argument("--heads", type=Path, nargs="+", default=[])
    parser.add_argument("--cache", default="f16")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--ways", nargs="+")
    args = parser.parse_args()
    ways = dict(list_ways(args))
    if unknown := {*(args.ways or ())} - ways.keys():
        parser.error(f"--ways has {min(unknown)}; with these files it takes {', '.join(ways)}")
    prompts, worst = load_prompts(args.prompts), 0.0
    with open_drafting(args, NO_DRAFTING) as runner:
        plain = [answer(runner, prompt, args.tokens, "plain") for prompt in prompts]
    for way, drafting in ways.items():
        if args.ways and way not in args.ways:
            continue
        with open_drafting(args, drafting) as runner:
            resources = runner.engine.resources
            assert resources.speculation
            branches = resources.speculation.max_branches if way.endswith("-tree") else 1
            assert branches > 1 or not way.endswith("-tree")
            speculation = replace(resources.speculation, takes_longest=True, max_branches=branches)
            if way == JOINT:
                speculation = replace(speculation, drafters=joint_drafters(speculation.drafters))
            runner.engine.resources = replace(resources, speculation=speculation)
            for _ in range(1 + (way == "pool")):  # which drafts from the first answers
                found = [answer(runner, prompt, args.tokens, "speculative") for prompt in prompts]
        ties = [tie(one, two) for one, two in zip(plain, found, strict=True)]
        different = [value for value in ties if value is not None]
        worst = max(worst, *different, 0.0)
        drafted, right = (sum(getattr(one, name) or 0 for one in found) for name in COUNTS)
        if not drafted or (way == JOINT and max(len(one.drafts) for one in found) < 2):
            sys.exit(f"{way}: not drafted as named")
        print(
            f"{way:15} {len(ties) - len(different)} of {len(ties)} equal, nearest ties "
            f"{max(different, default=0.0):.4f}; {right} of {drafted} guesses right",
            flush=True,
        )
    return int(worst > MAX_TIE)


if __name__ == "__main__":
    sys.exit(main())
