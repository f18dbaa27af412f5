#!/usr/bin/env python3
"""Make a reference model from a quantized file: equal logits, but weights on no quantization grid.

usage: .venv/bin/python scripts/quality/break_lattice.py IN.gguf OUT.gguf [--seed N] [--spread S]
       [--type F32|F16] [--unchecked]

A quantized file would be an easy reference, because its weights are exactly representable in its
own type. The script rescales and reorders channels in ways that do not change the model's function
(quant/folds): every free channel gets a random factor in [1/S, S] (default 1.1) and a random
position among the channels that it may change places with. A large S makes columns differ more than
in trained models, which favors folds. Then both models run in F32 on 256 tokens, with IN.gguf
dequantized, and the normalized mean squared error of the logits must be at most 1e-6, or 1e-5 with
F16. The script prints the tensors whose blocks may still be on their old grid. There are none,
unless quant/folds does not know a part of the model.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from quant import folds
from quant.folds.folded_source import MAX_RANDOM_FACTOR
from quant.native import ggml
from quant.quantize import plan, write
from quant.source.source import Source, Weight
from tests.quant.families import nmse

LIMITS = {"F32": 1e-6, "F16": 1e-5}
TOKENS = 256


def main() -> None:
    """Parse the flags, write the model, and compare the logits."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spread", type=float, default=MAX_RANDOM_FACTOR)
    parser.add_argument("--type", choices=LIMITS, default="F32")
    parser.add_argument("--unchecked", action="store_true", help="do not compare logits")
    args = parser.parse_args()
    source = write.open_gguf(args.source)
    random_folds = folds.randomize(source, args.seed, args.spread)
    edits = folds.combine_folds(random_folds)
    folded = folds.fold_source(
        source, random_folds, f"random, seed {args.seed}, spread {args.spread:g}"
    )
    write.write_model(plan.plan_quantization(folded, args.type), args.out)
    on_grid = [
        weight.name
        for weight in source.weights
        if ggml.is_quantized(weight.type) and not _leaves_grid(edits, weight)
    ]
    print(
        f"{args.out}: fold {folded.fold_digest}; still on a grid: {', '.join(on_grid) or 'no tensor'}",
        flush=True,
    )
    if not args.unchecked:
        _compare(source, args.out, LIMITS[args.type])


def _leaves_grid(edits: dict[str, folds.TensorEdit], weight: Weight) -> bool:
    """Return whether the edits scale or reorder a tensor's columns. If they change only its rows,
    each row remains on its grid.
    """
    edit = edits.get(weight.name)
    return edit is not None and (edit.column_factors is not None or edit.column_order is not None)


def _compare(source: Source, out: Path, limit: float) -> None:
    with tempfile.TemporaryDirectory(dir=out.parent) as temporary:
        plain = Path(temporary) / "plain.gguf"
        write.write_model(plan.plan_quantization(source, "F32"), plain)
        error = nmse(_logits(out), _logits(plain))
    print(f"logits of {TOKENS} tokens: NMSE {error:.1e}")
    if not error < limit:
        raise SystemExit(f"error: that is more than {limit}")


def _logits(path: Path) -> np.ndarray:
    import llama_cpp

    model = llama_cpp.Llama(
        str(path),
        n_ctx=TOKENS,
        n_batch=TOKENS,
        n_ubatch=TOKENS,
        logits_all=True,
        flash_attn=False,
        verbose=False,
        type_k=0,
        type_v=0,
    )
    random = np.random.default_rng(0)
    model.eval([int(token) for token in random.integers(1000, min(20000, model.n_vocab()), TOKENS)])
    scores = np.array(model.scores[:TOKENS])
    model.close()
    return scores


if __name__ == "__main__":
    main()
