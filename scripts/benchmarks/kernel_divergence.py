#!/usr/bin/env python3
"""Compare how far llmcli's kernels are from ggml's with how far two of ggml's own are from each other.

usage: .venv/bin/python scripts/benchmarks/kernel_divergence.py FILE.gguf ... [--tokens 20000]
       [--pass 256] [--threads 2]

The text is this project's documentation. It is computed in passes of --pass tokens, each in an
empty context, with llmcli's products and attention, with ggml's products in its layouts of weights,
and with ggml's products in the layout of the file. For each file the script prints the mean
Kullback-Leibler divergences of the predictions: from ggml's in the layout of the file to both
others, and between these. A divergence of 0 between ggml's two means that ggml has no layout for
the file's types. It exits with 1 if llmcli's divergence is larger than that of ggml's kernels.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.kernels import products
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.binding.placement.model_placement import ON_HOST
from llmcli.runtime.binding.rows.batch import BatchRows

Floats = NDArray[np.float32]
PLACEMENTS = {
    "llmcli": ON_HOST,
    "ggml, repacked": replace(ON_HOST, ggml_products=True),
    "ggml, as in the file": replace(ON_HOST, repack=False),
}
PAIRS = (
    ("ggml, as in the file", "ggml, repacked"),
    ("ggml, as in the file", "llmcli"),
    ("ggml, repacked", "llmcli"),
)
MARGIN = 1.05  # for the noise of a mean


def main() -> int:
    """Measure every file, and return 1 if a divergence is too large."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, default=20000)
    parser.add_argument("--pass", type=int, default=256, dest="pass_tokens")
    parser.add_argument("-t", "--threads", type=int, default=2)
    args = parser.parse_args()
    return int(sum(not compare(path, args) for path in args.files) > 0)


def compare(path: Path, args: argparse.Namespace) -> bool:
    """Measure one file and print its lines. Return whether llmcli's divergence is small enough."""
    options = ContextOptions(
        args.pass_tokens,
        args.pass_tokens,
        args.pass_tokens,
        n_threads=args.threads,
        n_threads_batch=args.threads,
        flash_attn="on",
        n_outputs=args.pass_tokens,
    )
    sums, count, same = dict.fromkeys(PAIRS, 0.0), 0, dict.fromkeys(PAIRS, 0)
    with ExitStack() as stack:
        contexts = {}
        for name, placement in PLACEMENTS.items():
            model = stack.enter_context(open_model(path, placement))
            contexts[name] = stack.enter_context(open_context(model, options))
        for tokens in passes(model, args.tokens, args.pass_tokens):
            found = {name: predict(context, tokens, name) for name, context in contexts.items()}
            tops = {name: scores.argmax(-1) for name, scores in found.items()}
            chances = {name: np.exp(found[name]) for name in {one for one, _ in PAIRS}}
            for one, other in PAIRS:
                terms = chances[one] * (found[one] - found[other])
                sums[one, other] += float(terms.sum(dtype=np.float64))
                same[one, other] += int((tops[one] == tops[other]).sum())
            count += len(tokens)
    print(f"{path.stem}: {count} tokens")
    for pair in PAIRS:
        share = same[pair] / count
        print(f"  {' to '.join(pair):45} {sums[pair] / count:.2e}   same likeliest {share:.4f}")
    between, own, from_repacked = (sums[pair] for pair in PAIRS)
    return between == 0 or min(own, from_repacked) <= MARGIN * between


def passes(model: Model, count: int, size: int) -> Iterator[list[int]]:
    """Yield the tokens of the passes, of `size` each."""
    folder = Path(__file__).resolve().parents[2] / "docs"
    text = "\n".join(path.read_text() for path in sorted(folder.glob("*.md")))
    tokens = model.tokenize(text, special=False)[:count]
    for first in range(0, len(tokens) - size + 1, size):
        yield list(tokens[first : first + size])


def predict(context: Context, tokens: list[int], name: str) -> Floats:
    """Return the log-probabilities after each token, `[tokens, vocabulary]`."""
    products.use_attention(own=name == "llmcli")  # f16 prompts stay with ggml
    context.clear()
    rows = BatchRows(tokens, range(len(tokens)), [0] * len(tokens), [True] * len(tokens))
    logits = np.stack([row.logits for row in context.decode(rows)])
    logits -= logits.max(-1, keepdims=True)
    return np.asarray(logits - np.log(np.exp(logits).sum(-1, keepdims=True)), np.float32)


if __name__ == "__main__":
    sys.exit(main())
