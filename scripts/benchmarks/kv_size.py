#!/usr/bin/env python3
"""Compare the predicted bytes of the KV cache with the bytes that llama.cpp allocates.

usage: .venv/bin/python scripts/benchmarks/kv_size.py [MODEL ...] [--all] [--no-families]

MODEL is a name of the catalog or a GGUF file (default: smollm2:135m and gemma3:270m). Tiny random
models follow, made with transformers and converted here: one of every family, and some with unusual
caches (one key head, as many key heads as query heads, an odd head size, an odd size of the
compressed key). Each model is opened with thirteen pairs of cache types, with one pool and with one
stream per sequence, with three context sizes, and with three pairs of sequence count and
micro-batch. llama.cpp must also refuse every context that the prediction refuses. The script prints
the contexts that differ and a line per model; --all prints every context. It exits with 1 if
anything differs.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from llmcli import config
from llmcli.errors import UserError
from llmcli.model_loader.prepare import prepare_model
from llmcli.runtime import kv_size
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.model import Model, open_model
from llmcli.ui import UI
from quant.convert import checkpoint_source
from quant.model_file import read_header
from quant.quantize import plan, write
from tests.quant import families
from tests.quant.families.deepseek2 import v2

SAME_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
TYPES = (
    *((kind, kind, "auto") for kind in SAME_TYPES),
    ("q8_0", "q4_0", "on"),
    ("f16", "q5_1", "auto"),
    ("f16", "f16", "off"),
    ("q8_0", "f32", "off"),
)
CONTEXTS = (300, 1024, 2500)
SIZES = ((1, 512), (3, 64), (8, 128))  # sequences, micro-batch
EXTRA_CASES = [
    families.Case("llama, one key head", "LlamaForCausalLM", {"num_key_value_heads": 1}),
    families.Case("llama, a key head a query head", "LlamaForCausalLM", {"num_key_value_heads": 8}),
    families.Case("llama, heads of 24", "LlamaForCausalLM", {"head_dim": 24}),
    families.Case("mistral, a window", "MistralForCausalLM", {"sliding_window": 64}),
    families.Case(
        "phi3, a window",
        "Phi3ForCausalLM",
        {"head_dim": None, "sliding_window": 64, "pad_token_id": 0},
    ),
    v2("compressed keys of 72", kv_lora_rank=40),
]


@dataclass(frozen=True)
class Row:
    """The KV-cache bytes of one context, predicted and allocated.

    `allocated` is None if llama.cpp refuses the context. `predicted` is None if our prediction
    refuses it, and -1 if there is no prediction for the model's architecture.
    """

    model: str
    options: ContextOptions
    predicted: int | None
    allocated: int | None

    @property
    def difference(self) -> int | None:
        """The predicted minus the allocated bytes. It is 0 if both sides refuse the context, and
        None if only one of them does.
        """
        if self.predicted is None or self.allocated is None:
            return 0 if self.predicted == self.allocated else None
        return self.predicted - self.allocated

    def __str__(self) -> str:
        o, refused = self.options, "refused"
        mode = "pool" if o.unified else "streams"
        return (
            f"{self.model:34} {o.type_k:>6} {o.type_v:>6} {o.flash_attn:>4} {mode:>7} {o.n_seq_max:>3} {o.n_ubatch:>4}"
            f" {o.n_ctx:>6} {refused if self.predicted is None else self.predicted:>12}"
            f" {refused if self.allocated is None else self.allocated:>12} {self.difference}"
        )


def measure(
    name: str, model: Model, shape: kv_size.CacheShape | None, options: ContextOptions
) -> Row:
    """Predict the cache size of a context, then open the context and read its real size. `shape` is
    None if the architecture has no prediction.
    """
    predicted: int | None = -1
    if shape:
        predicted = None
        if not kv_size.find_refusal(shape, options.type_k, options.type_v):
            predicted = kv_size.predict_cache(
                shape,
                options.n_ctx,
                options.type_k,
                options.type_v,
                n_ubatch=options.n_ubatch,
                n_seq_max=options.n_seq_max,
                flash=options.flash_attn != "off",
                unified=options.unified,
            ).nbytes
    try:
        with open_context(model, options) as context:
            breakdown = context.memory_breakdown()
            assert breakdown, "this build of llama.cpp does not report its memory"
            return Row(name, options, predicted, breakdown.context_bytes)
    except UserError:
        return Row(name, options, predicted, None)


def rows(name: str, path: Path) -> Iterator[Row]:
    """Yield a row for every context that is tried with one model file."""
    shape = kv_size.read_shape(read_header.read_header(path).metadata)
    with open_model(path) as model:
        for (type_k, type_v, flash), unified, n_ctx, (sequences, n_ubatch) in product(
            TYPES, (True, False), CONTEXTS, SIZES
        ):
            if (
                flash == "off"
                and type_k not in kv_size.FLOAT_TYPES
                and shape
                and any(head % 32 for head in shape.k_heads)
            ):
                # llama.cpp accepts these and computes wrong results; only the prediction refuses.
                continue
            options = ContextOptions(
                n_ctx, 512, n_ubatch, sequences, 1, 1, type_k, type_v, flash, unified
            )
            yield measure(name, model, shape, options)


def files(names: list[str], tiny: bool) -> Iterator[tuple[str, Path]]:
    """Yield the name and the file of each named model, then of each tiny model if `tiny` is set.
    The file of a tiny model is deleted when the next one is requested.
    """
    for name in names:
        yield name, prepare_model(name, None, config.load_config(), UI(color=False)).path
    seen: set[str] = set()
    for case in [*EXTRA_CASES, *families.cases()] if tiny else []:
        if case not in EXTRA_CASES and case.hf in seen:
            continue
        if case not in EXTRA_CASES:
            seen.add(case.hf)
        with tempfile.TemporaryDirectory() as temporary:
            folder, out = (
                families.build(case, Path(temporary) / "model"),
                Path(temporary) / "model.gguf",
            )
            write.write_model(
                plan.plan_quantization(checkpoint_source.open_checkpoint(folder), "F32"),
                out,
                threads=1,
            )
            yield case.name, out


def main() -> int:
    """Parse the flags, measure every model and print; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=["smollm2:135m", "gemma3:270m"])
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--no-families", action="store_true")
    args = parser.parse_args()
    n_wrong = n_contexts = 0
    print(
        "model, K, V, flash, mode, sequences, micro-batch, context, predicted, allocated, difference"
    )
    for name, path in files(args.models, not args.no_families):
        measured = list(rows(name, path))
        differing = [row for row in measured if row.difference != 0]
        for row in measured if args.all else differing:
            print(row)
        refused = sum(row.allocated is None for row in measured)
        largest = max((row.allocated or 0 for row in measured), default=0)
        line = f"{len(measured)} contexts, {refused} refused, up to {largest:,} bytes, {len(differing)} differ"
        print(f"{name:34} {line}", flush=True)
        n_wrong, n_contexts = n_wrong + len(differing), n_contexts + len(measured)
    print(f"{n_contexts} contexts, {n_wrong} differ")
    return 1 if n_wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
