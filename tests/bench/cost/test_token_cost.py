"""Bytes and operations per token of small models, compared with sums computed by hand."""

import pytest

from llmcli.bench.cost.token_cost import prompt_operations, token_cost
from llmcli.bench.roofline import RooflinePoint
from quant.model_file import read_header
from tests.quant import tiny_gguf

HIDDEN, FF, LAYERS, VOCAB = 64, 128, 2, 300
# Two layers with 4 heads of 16, two of them for keys and values; F32 everywhere.
MATRICES = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * 32 + 3 * HIDDEN * FF)
NORMS = LAYERS * 2 * HIDDEN + HIDDEN


def llama(tmp_path, **options):
    path = tiny_gguf.llama(
        tmp_path / "m.gguf", hidden=HIDDEN, ff=FF, layers=LAYERS, vocab=VOCAB, **options
    )
    return read_header.read_header(path)


def test_a_token_reads_every_matrix_and_one_row_of_the_embedding(tmp_path):
    cost = token_cost(llama(tmp_path), 100)
    head = VOCAB * HIDDEN
    assert cost.weight_bytes == {"F32": 4 * (MATRICES + NORMS + head + HIDDEN)}
    assert cost.weight_operations == 2 * (MATRICES + head)
    assert cost.head_operations == 2 * head
    assert cost.kv_bytes == 100 * LAYERS * (32 + 32) * 2
    assert cost.attention_operations == 100 * LAYERS * 2 * 4 * (16 + 16)
    assert cost.intensity == pytest.approx(
        (cost.weight_operations + cost.attention_operations)
        / (sum(cost.weight_bytes.values()) + cost.kv_bytes)
    )


def test_a_tied_embedding_is_read_completely_and_once(tmp_path):
    cost = token_cost(llama(tmp_path, tied=True), 0)
    assert cost.weight_bytes == {"F32": 4 * (MATRICES + NORMS + VOCAB * HIDDEN)}
    assert (cost.head_operations, cost.kv_bytes) == (2 * VOCAB * HIDDEN, 0)


def test_cache_types_change_the_bytes_but_not_the_operations(tmp_path):
    header = llama(tmp_path)
    plain, packed = token_cost(header, 64), token_cost(header, 64, "q8_0", "q4_0")
    assert packed.kv_bytes == 64 * LAYERS * (34 + 18)
    assert packed.attention_operations == plain.attention_operations


def test_sliding_window_layers_read_at_most_their_window(tmp_path):
    header = read_header.read_header(tiny_gguf.gemma3(tmp_path / "m.gguf", hidden=64, layers=6))
    cost = token_cost(header, 1000)
    # five of the six layers have a window of 16 tokens
    assert cost.kv_bytes == (5 * 16 + 1000) * (32 + 32) * 2


def test_only_the_experts_in_use_are_read(tmp_path):
    header = llama(tmp_path, experts=8)
    cost = token_cost(header, 0)
    expert_bytes = sum(tensor.nbytes for tensor in header.tensors if "_exps." in tensor.name)
    other_bytes = sum(
        t.nbytes for t in header.tensors if "_exps." not in t.name and t.name != "token_embd.weight"
    )
    assert sum(cost.weight_bytes.values()) == other_bytes + expert_bytes // 4 + 4 * HIDDEN
    # it is unknown which experts several sequences use
    assert RooflinePoint(0, cost, 1.0, 0.0).compute_bound_sequences(10.0) is None


def test_a_prompt_computes_the_output_head_once(tmp_path):
    header = llama(tmp_path)
    cost = token_cost(header, 50)
    assert (
        prompt_operations(header, 100)
        == 100 * (2 * MATRICES + cost.attention_operations) + cost.head_operations
    )


def test_an_unknown_cache_size_makes_the_cost_unknown(tmp_path):
    header = read_header.read_header(tiny_gguf.mamba(tmp_path / "m.gguf"))
    cost = token_cost(header, 10)
    assert (cost.nbytes, cost.intensity, prompt_operations(header, 10)) == (None, None, None)
    point = RooflinePoint(10, cost, 1.0, 0.0)
    assert (
        point.attainable_rate(1e9),
        point.achieved_fraction(1e9),
        point.compute_bound_sequences(5.0),
    ) == (None, None, None)


def test_number_of_sequences_at_which_generation_is_compute_bound(tmp_path):
    """Without a KV cache, two sequences have twice the intensity of one."""
    cost = token_cost(llama(tmp_path), 0)
    point = RooflinePoint(0, cost, 1.0, 0.0)
    assert point.compute_bound_sequences(2 * (cost.intensity or 0)) == 2
    assert point.compute_bound_sequences(0.001) == 1
    deep = RooflinePoint(4000, token_cost(llama(tmp_path), 4000), 1.0, 0.0)
    # the bytes of the KV caches grow as fast as the operations
    assert deep.compute_bound_sequences(100.0) == 0
