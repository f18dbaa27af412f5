#!/usr/bin/env python3
"""Write a model with IN's answers whose weights are on no quantization grid: a reference model made
from a quantized file.

usage: .venv/bin/python scripts/quality/break_lattice.py IN.gguf OUT.gguf [--seed N] [--spread S]
       [--type F32|F16] [--unchecked]

Every free channel gets a random factor in [1/S, S] (default 1.1) and a random position among those
that it may change with (quant/folds), which is exact in llama.cpp's graph. A large S makes columns
differ more than in trained models, which favors folds. Then both models run in F32 on 256 tokens,
IN dequantized, and their logits are compared (normalized mean squared error; at most 1e-6, or 1e-5
with F16). The script prints the tensors whose blocks might still be on their old grid: none, unless
the table lacks a block of the model.
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
    """Fold, write and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spread", type=float, default=MAX_RANDOM_FACTOR)
    parser.add_argument("--type", choices=LIMITS, default="F32")
    parser.add_argument("--unchecked", action="store_true", help="do not compare logits")
    given = parser.parse_args()
    source = write.open_gguf(given.source)
    chosen = folds.randomize(source, given.seed, given.spread)
    changes = folds.combine_folds(chosen)
    folded = folds.fold_source(
        source, chosen, f"random, seed {given.seed}, spread {given.spread:g}"
    )
    write.write_model(plan.plan_quantization(folded, given.type), given.out)
    left = [
        weight.name
        for weight in source.weights
        if ggml.is_quantized(weight.type) and not _moved(changes, weight)
    ]
    print(
        f"{given.out}: fold {folded.fold_digest}; still on a grid: {', '.join(left) or 'no tensor'}",
        flush=True,
    )
    if not given.unchecked:
        _compare(source, given.out, LIMITS[given.type])


def _moved(changes: dict[str, folds.TensorEdit], weight: Weight) -> bool:
    """Return whether a tensor's columns are scaled or reordered; with changed rows alone, rows stay
    on their grid.
    """
    edit = changes.get(weight.name)
    return edit is not None and (edit.column_factors is not None or edit.column_order is not None)


def _compare(source: Source, out: Path, limit: float) -> None:
    with tempfile.TemporaryDirectory(dir=out.parent) as place:
        plain = Path(place) / "plain.gguf"
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
