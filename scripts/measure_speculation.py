#!/usr/bin/env python3
"""What guessing tokens wins: speculative against plain decoding, answer by answer, inside one process.

usage: .venv/bin/python scripts/measure_speculation.py MODEL.gguf [--draft DRAFT.gguf] [--prompts FOLDER]
       [--tokens 128] [--rounds 3] [--tasks 20] [--cache q8_0] [--threads N]

Twenty tasks whose answers lean on their input (copies, edits, extractions, summaries of sonnets and of lists of
questions) and twenty free questions, out of FOLDER (default: ../shared/assets/prompts beside the repository). Each is
answered greedily by both in turn, the first place changing, ROUNDS times over one loaded model and one prefix. Told for
each: the ratio of speeds (medians), the share of tokens that were guessed right, and the bound: the ratio if a
pass of m rows took T(m) as llama.cpp alone does, measured at that depth, and nothing else took time. The text must be
the same (with quantized weights and --cache q8_0 it is, to the last bit).

Last, guesses by a drafter that knows the plain answers and spoils one in twenty: acceptance 0.95, against
max over g of (1 - a^(g+1)) / (1 - a) / (T(g+1) / T(1)).
"""

import argparse
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from llmcli.runtime.binding.context import Rows
from llmcli.runtime.drafting.base import Draft, Drafter, Guesses
from llmcli.runtime.drafting.curve import WIDTHS
from llmcli.runtime.drafting.wish import Drafting
from llmcli.runtime.request import Answer, Request, RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import defaults
from llmcli.runtime.sequence import Sequence
from llmcli.types import Message
from tests.drafts import Knowing

PROMPTS = Path(__file__).parents[2] / "shared" / "assets" / "prompts"
GREEDY = defaults().with_values({"temp": 0})
ON_POEMS = (
    "Write this poem again, word for word:\n\n{}", "Write this poem again with each line numbered:\n\n{}",
    "Write this poem again, but say 'your' where it says 'thy':\n\n{}",
    "Correct the old spelling in this poem and write all of it:\n\n{}",
    "Copy the lines of this poem that speak of time or beauty:\n\n{}",
    "Summarize this poem; quote the lines that you mean:\n\n{}",
)  # fmt: skip
ON_LISTS = (
    "Write this list again, numbered:\n\n{}", "Copy from this list the questions about people:\n\n{}",
    "Turn this list into a list of bullet points:\n\n{}", "Sort these questions by subject and write them all:\n\n{}",
)  # fmt: skip
RIGHT = 0.95


class Watched:
    """A drafter that notes, for each pass, how many tokens it guessed and how many were right."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.name, self.order, self.draws = drafter.name, drafter.order, drafter.draws
        self.passes: list[tuple[int, int]] = []

    def start(self, request: Request, seed: int) -> "Guessing":
        self.passes = []
        return Guessing(self.drafter.start(request, seed), self.passes)


class Guessing:
    """One answer of a watched drafter."""

    def __init__(self, guesses: Guesses, passes: list[tuple[int, int]]) -> None:
        self.guesses, self.passes = guesses, passes

    def follow(self, sequence: Sequence) -> None:
        self.guesses.follow(sequence)

    def shortened(self) -> None:
        self.guesses.shortened()

    def chances(self, count: int) -> list[float]:
        return self.guesses.chances(count)

    def cost(self, count: int) -> float:
        return self.guesses.cost(count)

    def reading(self) -> float:
        return self.guesses.reading()

    def draft(self, count: int) -> Draft:
        return self.guesses.draft(count)

    def judged(self, drafted: int, accepted: int) -> None:
        self.passes.append((drafted, accepted))
        self.guesses.judged(drafted, accepted)

    def close(self) -> None:
        self.guesses.close()


@dataclass(frozen=True)
class Figures:
    """One task, or many: seconds a token of both, the bound, tokens guessed, and right, and made."""

    ratio: float
    bound: float
    drafted: int
    accepted: int
    tokens: int
    same: bool


def tasks(folder: Path, count: int) -> tuple[list[str], list[str]]:
    """Prompts that lean on their input, and free ones."""
    poems = [poem.strip() for poem in re.split(r"\n\s*\n", (folder / "sonnet.txt").read_text()) if poem.strip()]
    if len(poems) < count:
        lines = (folder / "sonnet.txt").read_text().strip().splitlines()
        poems = ["\n".join(lines[at : at + 14]) for at in range(0, len(lines), 14)]
    questions = [json.loads(line)["turns"][0] for line in (folder / "vicuna_bench_question.jsonl").open()]
    short = [question for question in questions if len(question) < 120]
    lists = ["\n".join(short[at : at + 8]) for at in range(0, len(short), 8)]
    leaning = [
        ON_LISTS[at // 3 % len(ON_LISTS)].format(lists[at % len(lists)]) if at % 3 == 2
        else ON_POEMS[at % len(ON_POEMS)].format(poems[at % len(poems)])
        for at in range(count)
    ]  # fmt: skip
    return leaning, questions[: 4 * count : 4]


def answer(runner: Runner, prompt: tuple[int, ...], tokens: int, strategy: str) -> Answer:
    """One greedy answer."""
    reply = runner.reply(Request(prompt, GREEDY, max_tokens=tokens, endless=True, strategy=strategy))
    for _ in reply:
        pass
    return reply.answer


def costs(runner: Runner, rounds: int = 3) -> dict[int, float]:
    """T(m) / T(1) behind what slot 0 holds now, of llama.cpp alone; the cells are put back."""
    context, held = runner.context, len(runner.engine.ledger.tokens[0])
    times: dict[int, list[float]] = {}
    for _ in range(rounds):
        for rows in (1, *WIDTHS):
            forward = context.prepare(Rows([5] * rows, range(held, held + rows), [0] * rows, [True] * rows))
            begun = time.perf_counter()
            forward()
            times.setdefault(rows, []).append(time.perf_counter() - begun)
            context.trim(0, held)
    one = statistics.median(times[1])
    return {rows: statistics.median(each) / one for rows, each in times.items()}


def bound(curve: dict[int, float], passes: Iterable[tuple[int, int]], tokens: int) -> float:
    """The ratio of speeds if passes were all that takes time; the first token is the prompt's."""
    made, spent = 0, 0.0
    for drafted, accepted in passes:
        width = min((width for width in WIDTHS if width > drafted), default=WIDTHS[-1])
        made += accepted + 1
        spent += curve[width]
    return (tokens - 1) / (max(0, tokens - 1 - made) + spent)


def compare(runner: Runner, drafter: Watched, text: str, asked: argparse.Namespace) -> tuple[Figures, Answer]:
    """Both sides of one task."""
    prompt = runner.encode_chat([Message("user", text)]) if runner.template else runner.encode_text(text)
    seconds: dict[str, list[float]] = {"plain": [], "speculative": []}
    answers: dict[str, Answer] = {}
    for turn in range(asked.rounds):
        for side in sorted(seconds, reverse=bool(turn % 2)):
            made = answers[side] = answer(runner, prompt, asked.tokens, side)
            seconds[side].append(made.generate_ms / 1e3)
    plain, guessed = answers["plain"], answers["speculative"]
    ratio = statistics.median(seconds["plain"]) / max(1e-9, statistics.median(seconds["speculative"]))
    curve = costs(runner)
    return Figures(
        ratio, bound(curve, drafter.passes, len(guessed.tokens)), guessed.drafted or 0, guessed.accepted,
        len(guessed.tokens), plain.text == guessed.text,
    ), plain  # fmt: skip


def use(runner: Runner, drafters: Iterable[Drafter]) -> None:
    """Let these guess from now on."""
    means = runner.engine.means
    assert means.speculation, "guessing cannot pay here: no pass of several rows is cheaper than as many passes"
    runner.engine.means = replace(means, speculation=replace(means.speculation, drafters=tuple(drafters)))


def told(name: str, found: list[Figures]) -> None:
    """The figures of a group in four lines."""
    ratios, shares = [one.ratio for one in found], [one.ratio / one.bound for one in found]
    drafted, accepted = sum(one.drafted for one in found), sum(one.accepted for one in found)
    made = sum(one.tokens for one in found)
    print(f"{name}: {len(found)} tasks, {sum(one.same for one in found)} with the same text, {made} tokens")
    print(f"  ratio    median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")
    print(f"  of bound median {statistics.median(shares):.3f}, least {min(shares):.3f}")
    right = f"{accepted} ({accepted / max(1, drafted):.0%}), {accepted / made:.0%} of the text"
    print(f"  guessed  {drafted}, right {right}")


def group(runner: Runner, drafter: Watched, name: str, texts: list[str], asked: argparse.Namespace) -> list[Answer]:
    """Measure and tell one group of tasks; the plain answers."""
    found, answers = [], []
    for number, text in enumerate(texts, 1):
        figures, plain = compare(runner, drafter, text, asked)
        answers.append(plain)
        if len(plain.tokens) < 16:
            print(f"  {name} {number}: {len(plain.tokens)} tokens are too few to measure")
            continue
        found.append(figures)
        print(
            f"  {name} {number}: {figures.tokens} tokens, ratio {figures.ratio:.3f}, bound {figures.bound:.3f}, "
            f"guessed {figures.drafted}, right {figures.accepted}{'' if figures.same else ', ANOTHER TEXT'}", flush=True
        )  # fmt: skip
    told(name, found)
    return answers


def known(runner: Runner, texts: list[str], answers: list[Answer], asked: argparse.Namespace) -> None:
    """Acceptance 0.95 by a drafter that knows."""
    ratios, drafted, accepted, curves = [], 0, 0, []
    for text, plain in zip(texts, answers, strict=True):
        if len(plain.tokens) < 64:
            continue
        drafter = Knowing([token.id for token in plain.tokens], RIGHT, n_vocab=runner.model.n_vocab)
        use(runner, [Watched(drafter)])
        figures, _ = compare(runner, Watched(drafter), text, asked)
        ratios.append(figures.ratio)
        curves.append(costs(runner))
        drafted, accepted = drafted + figures.drafted, accepted + figures.accepted
    best = [max((1 - RIGHT**width) / (1 - RIGHT) / curve[width] for width in WIDTHS) for curve in curves]
    shares = [ratio / most for ratio, most in zip(ratios, best, strict=True)]
    print(
        f"acceptance {RIGHT}: {len(ratios)} tasks, ratio median {statistics.median(ratios):.3f}, bound median "
        f"{statistics.median(best):.3f}, of the bound median {statistics.median(shares):.3f}, least {min(shares):.3f}; "
        f"guessed {drafted}, right {accepted} ({accepted / max(1, drafted):.1%})"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--cache", default="q8_0")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    asked = parser.parse_args()
    options = RunOptions(ctx_size=2048, threads=asked.threads, cache_type_k=asked.cache, cache_type_v=asked.cache)
    with open_runner(asked.model, options, drafting=Drafting("on", asked.draft)) as runner:
        speculation = runner.engine.means.speculation
        assert speculation, "guessing cannot pay here: no pass of several rows is cheaper than as many passes"
        curve = speculation.curve
        prices = {rows: round(seconds / curve.one, 2) for rows, seconds in curve.seconds.items()}
        print(f"T(1) {curve.one * 1e3:.2f} ms, T(m) / T(1) {prices}, equal rows up to {curve.equal}")
        leaning, free = tasks(asked.prompts, asked.tasks)
        drafter = Watched(speculation.drafters[-1])
        use(runner, [drafter])
        group(runner, drafter, "leaning", leaning, asked)
        answers = group(runner, drafter, "free", free, asked)
        known(runner, free, answers, asked)


if __name__ == "__main__":
    main()
