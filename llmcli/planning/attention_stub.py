"""A model with the attention of another one and little else, as a GGUF: to measure attention
without its weights.

A Llama of a few narrow blocks, all its weights zero, with as many heads of the same sizes: ggml
takes its kernels by those, by the types of the cache, and by the rows of a pass.
"""

from dataclasses import dataclass
from typing import Self

from llmcli.runtime import kv_size
from quant.gguf import layout
from quant.model_file.model_header import ModelHeader

BLOCKS = 4
WIDTH = 32  # of the residual: what is multiplied beside attention is small
WORDS = 32
ALIGNMENT = 32
EVEN = 8  # sizes of heads are multiples of it
ARCH = "llama"


@dataclass(frozen=True, slots=True)
class Heads:
    """How many query heads a block has, how many of keys and values, and the size of one."""

    queries: int
    pairs: int
    size: int

    @classmethod
    def of(cls, header: ModelHeader, form: kv_size.CacheShape) -> Self | None:
        """Those of a model's largest block; None where they are not known, or keys and values
        differ in size, or it is one at which nobody has heads: of an odd one llama.cpp aborts,
        which turns pairs of values.
        """
        queries = header.get_int("attention.head_count")
        most = max(range(len(form.k_values)), key=form.k_values.__getitem__, default=None)
        if (
            not queries
            or most is None
            or form.is_latent
            or form.k_heads[most] != form.v_heads[most]
        ):
            return None
        size = form.k_heads[most]
        whole = size and size % EVEN == 0 and queries * size % form.k_values[most] == 0
        return cls(queries, form.k_values[most] // size, size) if whole else None


def written(heads: Heads, n_ctx: int) -> bytes:
    """The whole file."""
    numbers = {
        "context_length": n_ctx,
        "embedding_length": WIDTH,
        "block_count": BLOCKS,
        "feed_forward_length": WIDTH,
        "attention.head_count": heads.queries,
        "attention.head_count_kv": heads.pairs,
        "attention.key_length": heads.size,
        "attention.value_length": heads.size,
        "vocab_size": WORDS,
    }
    entries = [
        ("general.architecture", layout.encode_entry("string", ARCH)),
        ("tokenizer.ggml.model", layout.encode_entry("string", "no_vocab")),
        *(
            (f"{ARCH}.{key}", layout.encode_entry("uint32", number))
            for key, number in numbers.items()
        ),
        (f"{ARCH}.attention.layer_norm_rms_epsilon", layout.encode_entry("float32", 1e-5)),
    ]
    matrices = {
        "attn_q": (WIDTH, heads.queries * heads.size),
        "attn_output": (heads.queries * heads.size, WIDTH),
        "attn_k": (WIDTH, heads.pairs * heads.size),
        "attn_v": (WIDTH, heads.pairs * heads.size),
        "ffn_gate": (WIDTH, WIDTH),
        "ffn_up": (WIDTH, WIDTH),
        "ffn_down": (WIDTH, WIDTH),
    }
    tensors: list[tuple[str, tuple[int, ...], str]] = [
        ("token_embd.weight", (WIDTH, WORDS), "F32"),
        ("output_norm.weight", (WIDTH,), "F32"),
    ]
    for block in range(BLOCKS):
        tensors += [
            (f"blk.{block}.{name}.weight", shape, "F32") for name, shape in matrices.items()
        ]
        tensors += [
            (f"blk.{block}.{name}.weight", (WIDTH,), "F32") for name in ("attn_norm", "ffn_norm")
        ]
    made = layout.lay_out_file(entries, tensors, ALIGNMENT)
    return made.header + bytes(made.nbytes - len(made.header))
