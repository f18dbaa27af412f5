"""Our matrix products: numpy's results on decoded weights, independent of other rows, closer than
ggml's.
"""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmcli.errors import UserError
from llmcli.runtime.binding.batch import BatchRows
from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.binding.kernels import gemm
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.open_context import open_context
from llmcli.runtime.reproducible import with_required_options
from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.runner import open_runner
from quant.native import ggml
from quant.quantize import plan, write
from tests.quant import tiny_gguf

F32 = NDArray[np.float32]
TYPES = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8}  # enum ggml_type
COLUMNS, PROMPT = 96, 150
FEWEST = 8  # of gemm.c
BEYOND = 1 << 20  # rows that no pass has


def drawn(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def bfloat16(values: F32) -> NDArray[np.float64]:
    """Rounded to the nearest, ties to even."""
    bits = values.view(np.uint32)
    return (
        ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000)
        .astype(np.uint32)
        .view(np.float32)
        .astype(np.float64)
    )


@pytest.fixture
def own() -> None:
    if (
        gemm.multiply(TYPES["Q8_0"], ggml.encode(drawn(1, 32), "Q8_0", label=""), drawn(1, 32), 1)
        is None
    ):
        pytest.skip("this CPU has no bfloat16, or this build none of our C")


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("rows", [1, 4, 5, 8, 9, 16, 33, 49, 100])
def test_products_are_those_of_decoded_weights_and_inputs_in_bfloat16(kind: str, rows: int) -> None:
    for height in (1, 31, 77):
        blocks = ggml.encode(drawn(height, COLUMNS), kind, label="")
        inputs = drawn(rows, COLUMNS, seed=1)
        found = gemm.multiply(TYPES[kind], blocks, inputs, 2)
        assert found is not None
        exact = bfloat16(inputs) @ bfloat16(ggml.decode(blocks, kind, COLUMNS, label="")).T
        assert np.abs(found - exact).max() < 1e-5 * np.abs(exact).max()


@pytest.mark.usefixtures("own")
def test_a_row_has_the_same_bits_whatever_is_beside_it_and_however_many_threads_there_are() -> None:
    blocks, inputs = (
        ggml.encode(drawn(200, COLUMNS), "Q4_1", label=""),
        drawn(60, COLUMNS, seed=1),
    )
    whole = gemm.multiply(TYPES["Q4_1"], blocks, inputs, 1)
    assert whole is not None
    few = gemm.multiply(
        TYPES["Q4_1"], blocks, inputs[:FEWEST], 1
    )  # which are added up in another order
    assert few is not None
    assert not np.array_equal(few, whole[:FEWEST])
    for first, last, threads in (
        (0, 60, 2),
        (0, 60, 3),
        (10, 45, 2),
        (7, 8, 1),
        (3, 7, 2),
        (1, 8, 2),
    ):
        part = gemm.multiply(TYPES["Q4_1"], blocks, inputs[first:last], threads)
        assert part is not None
        assert np.array_equal(part, (few if last - first <= FEWEST else whole)[first:last])


def test_other_types_are_ggmls() -> None:
    blocks = ggml.encode(drawn(8, 256), "Q6_K", label="")
    assert gemm.multiply(14, blocks, drawn(40, 256), 1) is None


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.llama(tmp_path_factory.mktemp("gemm") / "f32.gguf", hidden=64, ff=96, layers=3)


@pytest.fixture(scope="module")
def weights(floats: Path) -> Path:
    """Quantized, so that products may be our own."""
    out = floats.with_name("q8_0.gguf")
    write.write_model(plan.plan_quantization(write.open_gguf(floats), "Q8_0"), out, threads=1)
    return out


@pytest.fixture(scope="module")
def decoded(floats: Path, weights: Path) -> Path:
    """The same weights as floats, which are multiplied as they are."""
    out = floats.with_name("again.gguf")
    write.write_model(plan.plan_quantization(write.open_gguf(weights), "F32"), out, threads=1)
    return out


def logits(path: Path, own: int, passes: tuple[int, ...] = (PROMPT,)) -> F32:
    """Of a prompt's last tokens, its rows computed in `passes`."""
    tokens, at, found = [(7 + 31 * i) % 300 for i in range(sum(passes))], 0, []
    options = ContextOptions(
        256, n_outputs=max(passes), n_threads=2, n_threads_batch=2, flash_attn="on"
    )
    with (
        gemm.enabled(own),
        open_model(path, gpu_layers=0) as model,
        open_context(model, options) as context,
    ):
        for count in passes:
            wants = [True] * count
            rows = BatchRows(tokens[at : at + count], range(at, at + count), [0] * count, wants)
            found += [row.logits.copy() for row in context.decode(rows)]
            at += count
    return np.stack(found)


def apart(one: F32, other: F32) -> float:
    return float(np.square(one - other).sum() / np.square(other).sum())


@pytest.mark.usefixtures("own")
def test_a_prompt_is_nearer_to_that_of_floats_than_ggmls_of_eight_bits(
    weights: Path, decoded: Path
) -> None:
    exact = logits(decoded, 0)
    ours, ggmls = apart(logits(weights, 4), exact), apart(logits(weights, 0), exact)
    assert 0 < ours < 0.5 * ggmls


@pytest.mark.usefixtures("own")
def test_passes_of_fewer_rows_stay_ggmls_to_the_bit(weights: Path) -> None:
    ggmls = logits(weights, 0)
    assert np.array_equal(logits(weights, BEYOND), ggmls)
    assert not np.array_equal(logits(weights, PROMPT), ggmls)
    assert np.array_equal(
        logits(weights, gemm.MIN_PROMPT_ROWS, (20, 9, 1)), logits(weights, 0, (20, 9, 1))
    )


@pytest.mark.usefixtures("own")
def test_the_newest_wish_counts_while_it_lasts(weights: Path) -> None:
    ggmls = logits(weights, 0)
    with gemm.enabled(4):
        with gemm.enabled(0):
            assert np.array_equal(logits(weights, 0), ggmls)
        ours = logits(weights, 4)
    assert not np.array_equal(ours, ggmls)
    assert np.array_equal(logits(weights, 0), ggmls)


@pytest.mark.usefixtures("own")
def test_who_asks_for_ggml_or_the_same_bits_gets_ggmls(weights: Path) -> None:
    """What a runner computes, by the logits of one prompt."""
    prompt = [(7 + 31 * i) % 300 for i in range(PROMPT)]
    found = {}
    for name, options in {
        "auto": RunOptions(256, 2),
        "ggml": RunOptions(256, 2, gemm="ggml"),
    }.items():
        with open_runner(weights, options, raw=True, gpu_layers=0) as runner:
            wants = [False] * (PROMPT - 1) + [True]
            (row,) = runner.context.decode(BatchRows(prompt, range(PROMPT), [0] * PROMPT, wants))
            found[name] = row.logits.copy()
    assert not np.array_equal(found["auto"], found["ggml"])
    assert with_required_options(RunOptions()).gemm == "ggml"


def test_guesses_that_are_looked_at_are_computed_as_single_tokens_are() -> None:
    assert gemm.choose_min_rows("auto", 4, has_drafts=False) == gemm.MIN_ANSWER_ROWS
    assert (
        gemm.choose_min_rows("auto", 4, has_drafts=True)
        == gemm.choose_min_rows("auto", 1, has_drafts=False)
        == gemm.MIN_PROMPT_ROWS
    )
    assert gemm.choose_min_rows("ggml", 4, has_drafts=False) == 0


def test_another_word_is_refused() -> None:
    with pytest.raises(UserError, match="mode 'fast'") as refused:
        gemm.check_mode("fast")
    assert refused.value.hint == "--gemm takes auto or ggml"
