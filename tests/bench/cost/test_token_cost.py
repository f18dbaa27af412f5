"""Bytes and operations per token, counted by hand for small models."""

import pytest

from llmcli.bench.cost.token_cost import prompt_operations, token_cost
from llmcli.bench.roofline import RooflinePoint
from quant.model_file import read_header
from tests.quant import tiny_gguf

HIDDEN, FF, LAYERS, VOCAB = 64, 128, 2, 300
# Two layers with 4 heads of 16, two of them for keys and values; F32 everywhere.
MATRICES = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * 32 + 3 * HIDDEN * FF)
NORMS = LAYERS * 2 * HIDDEN + HIDDEN


def llama(tmp_path, **more):
    path = tiny_gguf.llama(
        tmp_path / "m.gguf", hidden=HIDDEN, ff=FF, layers=LAYERS, vocab=VOCAB, **more
    )
    return read_header.read_header(path)


def test_every_matrix_is_read_once_and_the_embedding_s_one_row(tmp_path):
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


def test_an_embedding_that_is_the_head_is_read_whole_once(tmp_path):
    cost = token_cost(llama(tmp_path, tied=True), 0)
    assert cost.weight_bytes == {"F32": 4 * (MATRICES + NORMS + VOCAB * HIDDEN)}
    assert (cost.head_operations, cost.kv_bytes) == (2 * VOCAB * HIDDEN, 0)


def test_cache_types_change_the_bytes_and_not_the_operations(tmp_path):
    header = llama(tmp_path)
    plain, packed = token_cost(header, 64), token_cost(header, 64, "q8_0", "q4_0")
    assert packed.kv_bytes == 64 * LAYERS * (34 + 18)
    assert packed.attention_operations == plain.attention_operations


def test_a_window_is_read_no_further_than_it_reaches(tmp_path):
    header = read_header.read_header(tiny_gguf.gemma3(tmp_path / "m.gguf", hidden=64, layers=6))
    cost = token_cost(header, 1000)
    assert (
        cost.kv_bytes == (5 * 16 + 1000) * (32 + 32) * 2
    )  # of six layers five have a window of 16


def test_of_experts_those_that_are_used_are_read(tmp_path):
    header = llama(tmp_path, experts=8)
    cost = token_cost(header, 0)
    experts = sum(tensor.nbytes for tensor in header.tensors if "_exps." in tensor.name)
    rest = sum(
        t.nbytes for t in header.tensors if "_exps." not in t.name and t.name != "token_embd.weight"
    )
    assert sum(cost.weight_bytes.values()) == rest + experts // 4 + 4 * HIDDEN
    assert (
        RooflinePoint(0, cost, 1.0, 0.0).compute_bound_sequences(10.0) is None
    )  # which experts more sequences choose is not known


def test_a_prompt_computes_its_head_once(tmp_path):
    header = llama(tmp_path)
    cost = token_cost(header, 50)
    assert (
        prompt_operations(header, 100)
        == 100 * (2 * MATRICES + cost.attention_operations) + cost.head_operations
    )


def test_a_cache_that_is_not_known_leaves_the_figures_unknown(tmp_path):
    header = read_header.read_header(tiny_gguf.mamba(tmp_path / "m.gguf"))
    cost = token_cost(header, 10)
    assert (cost.nbytes, cost.intensity, prompt_operations(header, 10)) == (None, None, None)
    point = RooflinePoint(10, cost, 1.0, 0.0)
    assert (
        point.attainable_rate(1e9),
        point.achieved_fraction(1e9),
        point.compute_bound_sequences(5.0),
    ) == (None, None, None)


def test_how_many_sequences_leave_the_memory_bound(tmp_path):
    """At a ridge that is twice one sequence's intensity without KV, two do."""
    cost = token_cost(llama(tmp_path), 0)
    point = RooflinePoint(0, cost, 1.0, 0.0)
    assert point.compute_bound_sequences(2 * (cost.intensity or 0)) == 2
    assert point.compute_bound_sequences(0.001) == 1
    deep = RooflinePoint(4000, token_cost(llama(tmp_path), 4000), 1.0, 0.0)
    assert deep.compute_bound_sequences(100.0) == 0  # its KV grows as fast as its operations
