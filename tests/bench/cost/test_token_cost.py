"""Bytes and operations of a token, counted by hand for models small enough for it."""

import pytest

from llmcli.bench.cost.token_cost import prefill, work
from llmcli.bench.roofline import Point
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
    cost = work(llama(tmp_path), 100)
    head = VOCAB * HIDDEN
    assert cost.weights == {"F32": 4 * (MATRICES + NORMS + head + HIDDEN)}
    assert cost.operations == 2 * (MATRICES + head)
    assert cost.head == 2 * head
    assert cost.kv == 100 * LAYERS * (32 + 32) * 2
    assert cost.attention == 100 * LAYERS * 2 * 4 * (16 + 16)
    assert cost.intensity == pytest.approx(
        (cost.operations + cost.attention) / (sum(cost.weights.values()) + cost.kv)
    )


def test_an_embedding_that_is_the_head_is_read_whole_once(tmp_path):
    cost = work(llama(tmp_path, tied=True), 0)
    assert cost.weights == {"F32": 4 * (MATRICES + NORMS + VOCAB * HIDDEN)}
    assert (cost.head, cost.kv) == (2 * VOCAB * HIDDEN, 0)


def test_cache_types_change_the_bytes_and_not_the_operations(tmp_path):
    header = llama(tmp_path)
    plain, packed = work(header, 64), work(header, 64, "q8_0", "q4_0")
    assert packed.kv == 64 * LAYERS * (34 + 18)
    assert packed.attention == plain.attention


def test_a_window_is_read_no_further_than_it_reaches(tmp_path):
    header = read_header.read_header(tiny_gguf.gemma3(tmp_path / "m.gguf", hidden=64, layers=6))
    cost = work(header, 1000)
    assert cost.kv == (5 * 16 + 1000) * (32 + 32) * 2  # of six layers five have a window of 16


def test_of_experts_those_that_are_used_are_read(tmp_path):
    header = llama(tmp_path, experts=8)
    cost = work(header, 0)
    experts = sum(tensor.nbytes for tensor in header.tensors if "_exps." in tensor.name)
    rest = sum(
        t.nbytes for t in header.tensors if "_exps." not in t.name and t.name != "token_embd.weight"
    )
    assert sum(cost.weights.values()) == rest + experts // 4 + 4 * HIDDEN
    assert (
        Point(0, cost, 1.0, 0.0).leaving(10.0) is None
    )  # which experts more sequences choose is not known


def test_a_prompt_computes_its_head_once(tmp_path):
    header = llama(tmp_path)
    cost = work(header, 50)
    assert prefill(header, 100) == 100 * (2 * MATRICES + cost.attention) + cost.head


def test_a_cache_that_is_not_known_leaves_the_figures_unknown(tmp_path):
    header = read_header.read_header(tiny_gguf.mamba(tmp_path / "m.gguf"))
    cost = work(header, 10)
    assert (cost.nbytes, cost.intensity, prefill(header, 10)) == (None, None, None)
    point = Point(10, cost, 1.0, 0.0)
    assert (point.attainable(1e9), point.fraction(1e9), point.leaving(5.0)) == (None, None, None)


def test_how_many_sequences_leave_the_memory_bound(tmp_path):
    """At a ridge that is twice one sequence's intensity without KV, two do."""
    cost = work(llama(tmp_path), 0)
    point = Point(0, cost, 1.0, 0.0)
    assert point.leaving(2 * (cost.intensity or 0)) == 2
    assert point.leaving(0.001) == 1
    deep = Point(4000, work(llama(tmp_path), 4000), 1.0, 0.0)
    assert deep.leaving(100.0) == 0  # its KV grows as fast as its operations
