"""llmcli's attention inside of ggml's CPU backend equals that of decoded keys and values in float64, and
a token's result does not depend on other tokens, empty cells or threads.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from llmcli.runtime.binding.ggml_tensor import Tensor
from llmcli.runtime.binding.kernels import cpu_graph, products
from llmcli.runtime.binding.library import registry_lock

F32, F64 = NDArray[np.float32], NDArray[np.float64]
KINDS = {"F16": 1, "Q8_0": 8, "Q4_0": 2}
F32_KIND, F16_KIND = 0, 1


@pytest.fixture(autouse=True)
def own_attention() -> Iterator[None]:
    if not products.is_available():
        pytest.skip(products.unusable_reason())
    with registry_lock:
        products.choose_layout(())  # installs the functions
    yield
    products.use_attention(own=True)


@dataclass(frozen=True)
class Case:
    """The inputs of an attention. Shapes: queries `[streams, heads, rows, size]`, keys and values
    `[streams, pairs, cells, size]`, mask `[streams, rows, cells]`.
    """

    kind: str
    queries: F32
    keys: F32
    values: F32
    mask: NDArray[np.float16] | None
    cap: float = 0.0
    max_bias: float = 0.0
    sinks: F32 | None = None

    def expected(self) -> F64:
        """Return the result in float64, `[streams, rows, heads, size]`."""
        sharing = self.queries.shape[1] // self.keys.shape[1]
        keys, values = (
            np.repeat(stored(part, self.kind)[1].astype(np.float64), sharing, axis=1)
            for part in (self.keys, self.values)
        )
        scores = self.queries.astype(np.float64) @ keys.swapaxes(-1, -2) * scale(self.keys)
        if self.cap:
            scores = self.cap * np.tanh(scores / self.cap)
        if self.mask is not None:
            slopes = alibi_slopes(self.queries.shape[1], self.max_bias)
            scores = scores + slopes[:, None, None] * self.mask.astype(np.float64)[:, None]
        if self.sinks is not None:
            sinks = np.broadcast_to(self.sinks[:, None, None], (*scores.shape[:-1], 1))
            scores = np.concatenate([scores, sinks], -1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return (weights[..., : values.shape[2]] @ values).transpose(0, 2, 1, 3)


def alibi_slopes(heads: int, max_bias: float) -> F64:
    """Return the slopes of the paper (Press et al. 2021) for any number of heads."""
    if not max_bias:
        return np.ones(heads)
    power = 2 ** int(np.log2(heads))
    first = 2.0 ** (-max_bias / power * np.arange(1, power + 1))
    rest = 2.0 ** (-max_bias / power / 2 * np.arange(1, 2 * (heads - power), 2))
    return np.concatenate([first, rest])


def scale(keys: F32) -> float:
    return float(np.float32(1 / np.sqrt(keys.shape[-1])))


def stored(values: F32, kind: str) -> tuple[NDArray[np.uint8], F32]:
    """Return values in a cache type: their bytes, and what they are decoded to."""
    if kind == "F16":
        halves = values.astype(np.float16)
        return halves.view(np.uint8), halves.astype(np.float32)
    number = gguf.GGMLQuantizationType[kind]
    blocks = gguf.quants.quantize(values, number)
    return blocks, gguf.quants.dequantize(blocks, number)


def make_case(
    kind: str,
    *,
    rows: int = 1,
    cells: int = 600,
    size: int = 64,
    heads: int = 6,
    pairs: int = 2,
    streams: int = 1,
    mask: str = "causal",
) -> Case:
    random = np.random.default_rng(rows + cells)

    def floats(*shape: int) -> F32:
        return random.standard_normal(shape, np.float32)

    visible = np.ones((streams, rows, cells), bool)
    if mask in ("causal", "window"):
        visible &= np.arange(cells) <= cells - rows + np.arange(rows)[:, None]
        if mask == "window":
            visible &= np.arange(cells) > cells - rows + np.arange(rows)[:, None] - 300
    elif mask == "mixed":  # cells that were reused, so they are not in the order of the tokens
        order = random.permutation(cells)
        visible &= order <= cells - rows + np.arange(rows)[:, None]
    elif mask == "several":  # sequences of different lengths, whose cells alternate
        sequences = np.arange(rows)[:, None] % 3
        visible &= np.arange(cells) % 3 == sequences
        visible &= np.arange(cells) < cells - 100 * sequences
    elif mask == "holes":
        visible &= random.random((streams, rows, cells)) < 0.3
        visible[..., 7] = True
    halves = np.where(visible, np.float16(0), np.float16("-inf")).astype(np.float16)
    return Case(
        kind,
        floats(streams, heads, rows, size) * 3,
        floats(streams, pairs, cells, size),
        floats(streams, pairs, cells, size),
        None if mask == "none" else halves,
    )


def compute(case: Case, threads: int = 2) -> F32:
    """Return the attention that ggml's CPU backend computes, `[streams, rows, heads, size]`."""
    functions = cpu_graph._functions()
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    functions.ggml_new_tensor_4d.restype = pointer
    functions.ggml_new_tensor_4d.argtypes = [pointer, ctypes.c_int, *[number] * 4]
    functions.ggml_flash_attn_ext.restype = pointer
    functions.ggml_flash_attn_ext.argtypes = [*[pointer] * 5, *[ctypes.c_float] * 3]
    streams, heads, rows, size = case.queries.shape
    with cpu_graph.open_graph(threads) as graph:

        def tensor(kind: int, width: int, data: NDArray[np.generic]) -> int:
            outer = (*reversed(data.shape[:-1]), 1, 1, 1)[:3]
            made = functions.ggml_new_tensor_4d(graph._context, kind, width, *outer)
            return graph._keep(made, np.ascontiguousarray(data))

        queries = tensor(F32_KIND, size, case.queries)
        keys, values = (
            tensor(KINDS[case.kind], size, stored(part, case.kind)[0])
            for part in (case.keys, case.values)
        )
        mask = None
        if case.mask is not None:
            cells = case.mask.shape[-1]
            mask = functions.ggml_new_tensor_4d(graph._context, F16_KIND, cells, rows, 1, streams)
            graph._keep(mask, np.ascontiguousarray(case.mask))
        made = functions.ggml_flash_attn_ext(
            *(graph._context, queries, keys, values, mask),
            *(scale(case.keys), case.max_bias, case.cap),
        )
        if case.sinks is not None:
            functions.ggml_flash_attn_ext_add_sinks.argtypes = [pointer, pointer]
            functions.ggml_flash_attn_ext_add_sinks.restype = None
            functions.ggml_flash_attn_ext_add_sinks(
                made, tensor(F32_KIND, heads, np.ascontiguousarray(case.sinks))
            )
        assert list(Tensor.from_address(made).ne) == [size, heads, rows, streams]
        out = np.zeros((streams, rows, heads, size), np.float32)
        graph._keep(made, out)
        graph.output(made)
        graph.compute()
    return out


def largest_error(found: F32, expected: F64) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "cells", "mask"),
    [
        *((1, cells, "none") for cells in (1, 3, 256, 257)),
        *((1, 5000, mask) for mask in ("causal", "holes")),
        *((5, 700, mask) for mask in ("causal", "holes")),
        (63, 300, "causal"),
        *((70, 1100, mask) for mask in ("none", "causal", "window", "mixed", "several", "holes")),
    ],
)
def test_attention_equals_that_of_decoded_cells(
    kind: str, rows: int, cells: int, mask: str
) -> None:
    case = make_case(kind, rows=rows, cells=cells, mask=mask)
    assert largest_error(compute(case), case.expected()) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("size", "heads", "pairs"), [(32, 4, 4), (96, 9, 3), (128, 12, 2), (256, 4, 1)]
)
def test_any_shape_of_heads(kind: str, size: int, heads: int, pairs: int) -> None:
    case = make_case(kind, rows=2, size=size, heads=heads, pairs=pairs, streams=3, mask="holes")
    assert largest_error(compute(case), case.expected()) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cells", [100, 3000])
@pytest.mark.parametrize("extra", ["cap", "bias", "sinks", "all"])
def test_caps_biases_and_sinks(kind: str, cells: int, extra: str) -> None:
    """As of Gemma 2, MPT and gpt-oss."""
    case = make_case(kind, rows=2, cells=cells, heads=6)
    assert case.mask is not None
    if extra in ("cap", "all"):
        case = replace(case, cap=5.0)
    if extra in ("bias", "all"):
        distance = -np.arange(cells)[::-1].astype(np.float16) / 8
        mask = np.where(np.isinf(case.mask), case.mask, distance).astype(np.float16)
        case = replace(case, mask=mask, max_bias=8.0)
    if extra in ("sinks", "all"):
        case = replace(case, sinks=np.array([-3, 0, 2, 9, 30, -50], np.float32))
    assert largest_error(compute(case), case.expected()) < 1e-5
    products.use_attention(own=False)
    assert largest_error(compute(case), case.expected()) < 0.05  # so the expectation is ggml's


def test_it_is_computed_here_and_more_exact_than_by_ggml() -> None:
    case = make_case("F16", cells=5000)
    own = largest_error(compute(case), case.expected())
    products.use_attention(own=False)
    assert largest_error(compute(case), case.expected()) > 10 * own


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_beside_other_rows_and_with_any_threads(kind: str) -> None:
    case = make_case(kind, rows=17, cells=1500)
    assert case.mask is not None
    together = compute(case)
    for threads in (1, 3):
        np.testing.assert_array_equal(compute(case, threads), together)
    for row in (0, 16):
        alone = replace(
            case, queries=case.queries[:, :, row : row + 1], mask=case.mask[:, row : row + 1]
        )
        for threads in (1, 2):
            np.testing.assert_array_equal(compute(alone, threads)[:, 0], together[:, row])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", ["none", "causal", "window", "mixed", "several"])
def test_a_row_of_a_prompt_has_the_same_bits_alone(kind: str, mask: str) -> None:
    """Rows of a prompt are computed in tiles, which share decoded cells."""
    case = make_case(kind, rows=101, cells=1100, heads=7, pairs=1, mask=mask)
    together = compute(case)
    np.testing.assert_array_equal(compute(case, 1), together)
    for row in (0, 1, 31, 32, 77, 100):
        alone = replace(
            case,
            queries=case.queries[:, :, row : row + 1],
            mask=None if case.mask is None else case.mask[:, row : row + 1],
        )
        np.testing.assert_array_equal(compute(alone)[:, 0], together[:, row])


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_of_several_streams(kind: str) -> None:
    case = make_case(kind, rows=40, cells=600, streams=3, mask="holes")
    assert largest_error(compute(case), case.expected()) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_with_empty_cells_between(kind: str) -> None:
    case = make_case(kind, cells=900, mask="none")
    places = np.sort(np.random.default_rng(2).choice(2000, 900, replace=False))

    def spread(part: F32) -> F32:
        out = np.full((1, 2, 2000, 64), 9, np.float32)
        out[:, :, places] = part
        return out

    mask = np.full((1, 1, 2000), np.float16("-inf"))
    mask[..., places] = 0
    other = replace(case, keys=spread(case.keys), values=spread(case.values), mask=mask)
    np.testing.assert_array_equal(compute(other), compute(case))


def test_a_row_that_sees_no_cell_is_zero() -> None:
    case = make_case("F16", rows=2, cells=600)
    assert case.mask is not None
    case.mask[:, 0] = np.float16("-inf")
    found = compute(case)
    assert not found[:, 0].any()
    assert found[:, 1].any()
