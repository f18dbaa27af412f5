#!/usr/bin/env python3
"""Compare this project's matrix products of many rows with ggml's, by the number of rows.

usage: .venv/bin/python scripts/benchmarks/gemm.py FILE.gguf ... [--rows 4,8,16,32,64,128,512]
       [--behind 0] [--rounds 7] [--threads 2]

Two contexts of one model are open at once and compute a pass in turn. Up to 16 rows are the next
tokens of that many answers, each after `behind` tokens; more rows are one prompt. For each file and
number of rows the script prints the tokens per second of both, their ratio (ours / ggml, medians)
with the lowest and highest ratio of a round, and the relative squared error of our logits against
ggml's. Most of that error comes from ggml, which rounds inputs to 8 bits
(tests/runtime/binding/kernels/test_gemm.py).
"""

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.binding.batch import BatchRows
from llmcli.runtime.binding.context import Context
from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.binding.kernels import gemm
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.open_context import open_context

ANSWERS = 16  # up to this number, each row is an answer; more rows are a prompt


def main() -> None:
    """Measure every file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--rows", default="4,8,16,32,64,128,512")
    parser.add_argument("--behind", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    print("file                 rows   tokens/s ours    ggml   ratio (of the rounds)   logit error")
    for path in given.files:
        for count in (int(word) for word in given.rows.split(",")):
            compare(path, count, given)


def compare(path: Path, count: int, given: argparse.Namespace) -> None:
    """Measure one file and number of rows."""
    answers = count if count <= ANSWERS else 1
    cells = (given.behind + 8) * answers + count
    options = ContextOptions(
        cells,
        2048,
        512,
        answers,
        given.threads,
        given.threads,
        flash_attn="on",
        n_outputs=max(answers, 1),
    )
    ways = (gemm.MIN_ANSWER_ROWS, 0)
    with gemm.enabled(ways[0]), open_model(path, gpu_layers=0) as model:
        with open_context(model, options) as ours, open_context(model, options) as theirs:
            spent: tuple[list[float], list[float]] = [], []
            logits = [np.empty(0), np.empty(0)]
            for turn in range(given.rounds + 1):
                for at, (own, context) in enumerate(zip(ways, (ours, theirs), strict=True)):
                    with gemm.enabled(own):
                        seconds, logits[at] = once(
                            context, count, answers, given.behind, model.n_vocab
                        )
                    if turn:
                        spent[at].append(seconds)
    ratios = [other / one for one, other in zip(*spent, strict=True)]
    rates = [count / statistics.median(each) for each in spent]
    apart = float(np.square(logits[0] - logits[1]).sum() / np.square(logits[1]).sum())
    print(
        f"{path.stem[:20]:20} {count:4} {rates[0]:15.0f} {rates[1]:7.0f}   {rates[0] / rates[1]:.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f})   {apart:.1e}",
        flush=True,
    )


def once(
    context: Context, count: int, answers: int, behind: int, words: int
) -> tuple[float, NDArray[np.float64]]:
    """Return the seconds of a pass and its last logits; the `behind` tokens before it are not
    timed.
    """
    context.clear()
    for sequence in range(answers if behind else 0):
        tokens = [(11 + 37 * place + sequence) % words for place in range(behind)]
        context.decode(BatchRows(tokens, range(behind), [sequence] * behind, [False] * behind))
    each = count // answers
    tokens = [(7 + 101 * place) % words for place in range(count)]
    positions = [behind + place % each for place in range(count)]
    sequences = [place // each for place in range(count)]
    wants = [answers > 1 or place == count - 1 for place in range(count)]
    begun = time.perf_counter()
    found = context.decode(BatchRows(tokens, positions, sequences, wants))
    return time.perf_counter() - begun, found[-1].logits.astype(np.float64)


if __name__ == "__main__":
    main()
