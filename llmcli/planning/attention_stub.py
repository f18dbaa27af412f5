"""A stub model (GGUF) that imitates the attention of another model, to measure attention without
that model's weights.

The stub is a Llama of a few narrow blocks whose weights are zero. It has the same number and size
of heads as the other model. Together with the cache types and the rows of a pass, these determine
which kernels ggml uses.
"""

from dataclasses import dataclass
from typing import Self

from llmcli.runtime import kv_size
from quant.gguf import layout
from quant.model_file.model_header import ModelHeader

STUB_BLOCKS = 4
# width of the residual stream; small, so that other matrix products hardly take time
STUB_WIDTH = 32
VOCABULARY_SIZE = 32
ALIGNMENT = 32
HEAD_SIZE_MULTIPLE = 8  # heads of other sizes are not measured
STUB_ARCH = "llama"


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The attention heads of a block. `queries`: number of query heads. `pairs`: number of
    key-value heads. `size`: values per head.
    """

    queries: int
    pairs: int
    size: int

    @classmethod
    def from_header(cls, header: ModelHeader, form: kv_size.CacheShape) -> Self | None:
        """Return the heads of the block with the largest keys.

        Returns None if the heads are unknown, if keys and values differ in size, or if the size is
        not a multiple of HEAD_SIZE_MULTIPLE. With an odd size, llama.cpp would abort, because RoPE
        rotates pairs of values.
        """
        queries = header.get_int("attention.head_count")
        largest = max(range(len(form.k_values)), key=form.k_values.__getitem__, default=None)
        if (
            not queries
            or largest is None
            or form.is_latent
            or form.k_heads[largest] != form.v_heads[largest]
        ):
            return None
        size = form.k_heads[largest]
        is_regular = (
            size and size % HEAD_SIZE_MULTIPLE == 0 and queries * size % form.k_values[largest] == 0
        )
        return cls(queries, form.k_values[largest] // size, size) if is_regular else None


def build_stub_model(heads: HeadShape, n_ctx: int) -> bytes:
    """Return the bytes of a complete GGUF file of the stub, with a context length of `n_ctx`."""
    numbers = {
        "context_length": n_ctx,
        "embedding_length": STUB_WIDTH,
        "block_count": STUB_BLOCKS,
        "feed_forward_length": STUB_WIDTH,
        "attention.head_count": heads.queries,
        "attention.head_count_kv": heads.pairs,
        "attention.key_length": heads.size,
        "attention.value_length": heads.size,
        "vocab_size": VOCABULARY_SIZE,
    }
    entries = [
        ("general.architecture", layout.encode_entry("string", STUB_ARCH)),
        ("tokenizer.ggml.model", layout.encode_entry("string", "no_vocab")),
        *(
            (f"{STUB_ARCH}.{key}", layout.encode_entry("uint32", number))
            for key, number in numbers.items()
        ),
        (f"{STUB_ARCH}.attention.layer_norm_rms_epsilon", layout.encode_entry("float32", 1e-5)),
    ]
    matrices = {
        "attn_q": (STUB_WIDTH, heads.queries * heads.size),
        "attn_output": (heads.queries * heads.size, STUB_WIDTH),
        "attn_k": (STUB_WIDTH, heads.pairs * heads.size),
        "attn_v": (STUB_WIDTH, heads.pairs * heads.size),
        "ffn_gate": (STUB_WIDTH, STUB_WIDTH),
        "ffn_up": (STUB_WIDTH, STUB_WIDTH),
        "ffn_down": (STUB_WIDTH, STUB_WIDTH),
    }
    tensors: list[tuple[str, tuple[int, ...], str]] = [
        ("token_embd.weight", (STUB_WIDTH, VOCABULARY_SIZE), "F32"),
        ("output_norm.weight", (STUB_WIDTH,), "F32"),
    ]
    for block in range(STUB_BLOCKS):
        tensors += [
            (f"blk.{block}.{name}.weight", shape, "F32") for name, shape in matrices.items()
        ]
        tensors += [
            (f"blk.{block}.{name}.weight", (STUB_WIDTH,), "F32")
            for name in ("attn_norm", "ffn_norm")
        ]
    file_layout = layout.lay_out_file(entries, tensors, ALIGNMENT)
    return file_layout.header + bytes(file_layout.nbytes - len(file_layout.header))
