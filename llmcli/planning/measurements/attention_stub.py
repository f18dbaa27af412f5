"""Build a stub model: a small GGUF file with the same attention heads as a given model, to measure
the speed of its attention without its weights.

The stub is a Llama with a few narrow layers (blocks) whose weights are zero. ggml chooses its
attention kernels by the number and the size of the heads, the cache types and the number of tokens
in a pass, so the stub uses the kernels of the given model.
"""

from dataclasses import dataclass
from typing import Self

from llmcli.runtime import kv_size
from quant.gguf import layout
from quant.model_file.model_header import ModelHeader

STUB_BLOCKS = 4
# width of the residual stream; small, so that the products with weights hardly take time
STUB_WIDTH = 32
VOCABULARY_SIZE = 32
ALIGNMENT = 32
HEAD_SIZE_MULTIPLE = 8  # models with other head sizes are not measured
STUB_ARCH = "llama"


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The attention heads of one layer."""

    queries: int  # number of query heads
    pairs: int  # number of KV heads
    size: int  # numbers in the key, and in the value, of one head

    @classmethod
    def from_header(cls, header: ModelHeader, cache_shape: kv_size.CacheShape) -> Self | None:
        """Return the heads of the layer whose keys are largest.

        Return None if the number of heads is unknown, if keys and values differ in size, or if the
        head size is not a multiple of HEAD_SIZE_MULTIPLE. (For an odd size llama.cpp would abort,
        because RoPE rotates pairs of numbers.)
        """
        queries = header.get_int("attention.head_count")
        largest = max(
            range(len(cache_shape.k_values)), key=cache_shape.k_values.__getitem__, default=None
        )
        if (
            not queries
            or largest is None
            or cache_shape.is_latent
            or cache_shape.k_heads[largest] != cache_shape.v_heads[largest]
        ):
            return None
        size = cache_shape.k_heads[largest]
        is_regular = (
            size
            and cache_shape.k_values[largest]
            and size % HEAD_SIZE_MULTIPLE == 0
            and queries * size % cache_shape.k_values[largest] == 0
        )
        return cls(queries, cache_shape.k_values[largest] // size, size) if is_regular else None


def build_stub_model(heads: HeadShape, n_ctx: int) -> bytes:
    """Return the bytes of a complete GGUF file of the stub with these heads. `n_ctx`: the context
    length in its metadata.
    """
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
