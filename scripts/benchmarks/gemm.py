#!/usr/bin/env python3
"""Compare this project's matrix products with ggml's, by the number of rows.

usage: .venv/bin/python scripts/benchmarks/gemm.py FILE.gguf ... [--rows 1,2,4,8,16,32,64,128,512]
       [--behind 0] [--rounds 7] [--threads 2]

The file is loaded twice, with this project's products (those inside of ggml's CPU backend, or those
in bfloat16, as `--gemm auto` chooses) and with ggml's. Their contexts compute a pass in turn, the
first one changing. Up to 16 rows are the next tokens of that many answers, each
with --behind tokens in the cache; more rows are one prompt. For each file and number of rows the
script prints the tokens per second of both kernels, the ratio of the medians (ours / ggml) with the
lowest and highest ratio of a round, and the relative squared error of our logits against ggml's.
Most of the error of bfloat16 comes from ggml, which rounds inputs to 8 bits
(tests/runtime/binding/kernels/test_gemm.py).
"""

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.kernels import gemm
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.placement.model_placement import ON_HOST
from llmcli.runtime.binding.rows.batch import BatchRows

ANSWERS = 16  # up to this number, each row is the token of another answer; more rows are a prompt


def main() -> None:
    """Parse the flags, and measure every file with every number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128,512")
    parser.add_argument("--behind", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("-t", "--threads", type=int, default=2)
    args = parser.parse_args()
    print("file                 rows   tokens/s ours    ggml   ratio (of the rounds)   logit error")
    for path in args.files:
        for count in (int(word) for word in args.rows.split(",")):
            compare(path, count, args)


def compare(path: Path, count: int, args: argparse.Namespace) -> None:
    """Measure one file with `count` rows per pass, and print a line."""
    answers = count if count <= ANSWERS else 1
    cells = (args.behind + 8) * answers + count
    options = ContextOptions(
        cells,
        2048,
        512,
        answers,
        args.threads,
        args.threads,
        flash_attn="on",
        n_outputs=max(answers, 1),
    )
    own_options = replace(options, gemm_min_rows=gemm.MIN_ANSWER_ROWS)
    with (
        open_model(path, ON_HOST) as model,
        open_model(path, replace(ON_HOST, ggml_products=True)) as other,
        open_context(model, own_options) as ours,
        open_context(other, options) as theirs,
    ):
        seconds_of: tuple[list[float], list[float]] = [], []
        logits = [np.empty(0), np.empty(0)]
        contexts = [(0, ours), (1, theirs)]
        for round_number in range(args.rounds + 1):
            for index, context in contexts:
                seconds, logits[index] = timed_pass(
                    context, count, answers, args.behind, model.n_vocab
                )
                if round_number:
                    seconds_of[index].append(seconds)
            contexts.reverse()
    ratios = [other / one for one, other in zip(*seconds_of, strict=True)]
    rates = [count / statistics.median(each) for each in seconds_of]
    error = float(np.square(logits[0] - logits[1]).sum() / np.square(logits[1]).sum())
    print(
        f"{path.stem[:20]:20} {count:4} {rates[0]:15.0f} {rates[1]:7.0f}   {rates[0] / rates[1]:.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f})   {error:.1e}",
        flush=True,
    )


def timed_pass(
    context: Context, count: int, answers: int, depth: int, n_vocab: int
) -> tuple[float, NDArray[np.float64]]:
    """Compute one pass of `count` rows; return its seconds and the logits of its last row.

    The rows are divided among `answers` sequences. Each sequence has `depth` tokens in the cache,
    which are computed first and not timed.
    """
    context.clear()
    for sequence in range(answers if depth else 0):
        tokens = [(11 + 37 * index + sequence) % n_vocab for index in range(depth)]
        context.decode(BatchRows(tokens, range(depth), [sequence] * depth, [False] * depth))
    rows_per_answer = count // answers
    tokens = [(7 + 101 * index) % n_vocab for index in range(count)]
    positions = [depth + index % rows_per_answer for index in range(count)]
    sequences = [index // rows_per_answer for index in range(count)]
    wants = [answers > 1 or index == count - 1 for index in range(count)]
    began = time.perf_counter()
    outputs = context.decode(BatchRows(tokens, positions, sequences, wants))
    return time.perf_counter() - began, outputs[-1].logits.astype(np.float64)


if __name__ == "__main__":
    main()
