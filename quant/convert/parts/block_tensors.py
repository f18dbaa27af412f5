"""The tensors that the blocks of most model families have: their shapes, rows first, and their names."""

from collections.abc import Callable

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import Tensors
from quant.convert.parts import layout
from quant.convert.parts.base import Shapes


def embedding_and_head(config: CheckpointConfig) -> Shapes:
    """Return the shapes of the embedding, the norm after the last layer, and the head. A head that
    is tied to the embedding is left out.
    """
    hidden, vocab = config.get_int("hidden_size"), config.get_int("vocab_size")
    shapes: Shapes = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,)}
    if not config.get_bool("tie_word_embeddings"):
        shapes["output.weight"] = (vocab, hidden)
    return shapes


def attention_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one block's grouped-query attention and the norm before it, by role."""
    hidden, (count, kv_heads, head_dim) = config.get_int("hidden_size"), layout.head_counts(config)
    query_width, kv_width = count * head_dim, kv_heads * head_dim
    return {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (query_width, hidden),
        "attn_k.weight": (kv_width, hidden),
        "attn_v.weight": (kv_width, hidden),
        "attn_output.weight": (hidden, query_width),
    }


def fused_attention_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one block's attention, with queries, keys and values in one matrix, and
    the norm before it, by role.
    """
    hidden, (count, kv_heads, head_dim) = config.get_int("hidden_size"), layout.head_counts(config)
    return {
        "attn_norm.weight": (hidden,),
        "attn_qkv.weight": ((count + 2 * kv_heads) * head_dim, hidden),
        "attn_output.weight": (hidden, count * head_dim),
    }


def qkv_bias_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one block's biases of queries, keys and values, by role."""
    count, kv_heads, head_dim = layout.head_counts(config)
    query_width, kv_width = count * head_dim, kv_heads * head_dim
    return {"attn_q.bias": (query_width,), "attn_k.bias": (kv_width,), "attn_v.bias": (kv_width,)}


def head_norm_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one block's norms of each query head and each key head, by role."""
    head_dim = layout.head_counts(config)[2]
    return {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}


def separate_head_norm_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one block's norms of query heads and key heads, by role, where each head
    has weights of its own.
    """
    count, kv_heads, head_dim = layout.head_counts(config)
    return {"attn_q_norm.weight": (count, head_dim), "attn_k_norm.weight": (kv_heads, head_dim)}


def joint_head_norm_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one block's norm over all query heads together and of that over all key
    heads together, by role.
    """
    count, kv_heads, head_dim = layout.head_counts(config)
    return {"attn_q_norm.weight": (count * head_dim,), "attn_k_norm.weight": (kv_heads * head_dim,)}


def feed_forward_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one block's gated feed-forward and the norm before it, by role."""
    hidden, ff = config.get_int("hidden_size"), config.get_int("intermediate_size")
    return {
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (ff, hidden),
        "ffn_up.weight": (ff, hidden),
        "ffn_down.weight": (hidden, ff),
    }


def plain_feed_forward_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one block's feed-forward of two matrices, without a gate, and the norm
    before it, by role.
    """
    shapes = feed_forward_shapes(config)
    del shapes["ffn_gate.weight"]
    return shapes


def output_bias_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of the biases of one block's attention output and of its feed-forward
    without a gate, by role.
    """
    hidden, ff = config.get_int("hidden_size"), config.get_int("intermediate_size")
    return {"attn_output.bias": (hidden,), "ffn_up.bias": (ff,), "ffn_down.bias": (hidden,)}


def norm_bias_shapes(config: CheckpointConfig, *roles: str) -> Shapes:
    """Return the shapes of the biases of the norms `roles`, such as "attn_norm", by role."""
    return {f"{role}.bias": (config.get_int("hidden_size"),) for role in roles}


def fused_feed_forward_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one block's gated feed-forward, with gate and up in one matrix, and the
    norm before it, by role.
    """
    hidden, ff = config.get_int("hidden_size"), config.get_int("intermediate_size")
    return {
        "ffn_norm.weight": (hidden,),
        "ffn_up.weight": (2 * ff, hidden),
        "ffn_down.weight": (hidden, ff),
    }


def post_norm_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one block's norms after attention and after feed-forward, by role."""
    hidden = config.get_int("hidden_size")
    return {"post_attention_norm.weight": (hidden,), "post_ffw_norm.weight": (hidden,)}


def repeat_for_blocks(config: CheckpointConfig, *block_shapes: Shapes) -> Shapes:
    """Return the shapes of the tensors of all blocks by GGUF name ("blk.0.attn_q.weight"), given
    the shapes of one block's tensors by role ("attn_q.weight").
    """
    roles = {role: shape for shapes in block_shapes for role, shape in shapes.items()}
    return shapes_by_block(layout.layer_count(config), lambda layer: roles)


def shapes_by_block(count: int, block_shapes: Callable[[int], Shapes]) -> Shapes:
    """Return the shapes of the tensors of `count` blocks by GGUF name. `block_shapes` returns the
    shapes of the tensors of the block with this number, by role.
    """
    return {
        f"blk.{layer}.{role}": shape
        for layer in range(count)
        for role, shape in block_shapes(layer).items()
    }


def rename_tensors(tensors: Tensors, new_name: Callable[[str], str | None]) -> Tensors:
    """Return the tensors under the names that `new_name` returns for their names, without those for
    which it returns None.

    A tensor whose new name is taken keeps its name, so that the converter reports it as unknown.
    """
    result: Tensors = {}
    for name, tensor in tensors.items():
        renamed = new_name(name)
        if renamed is not None:
            result[name if renamed in tensors or renamed in result else renamed] = tensor
    return result
