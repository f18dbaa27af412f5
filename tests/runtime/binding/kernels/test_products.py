"""llmcli's products inside of ggml's CPU backend equal those of decoded weights and rounded inputs, do
not depend on the other rows, and are used by the models that are loaded with their layout.
"""

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.kernels import products
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.binding.placement.model_placement import ON_HOST
from llmcli.runtime.binding.rows.batch import BatchRows
from quant.native import kernels
from quant.quantize import plan, write
from tests.quant import tiny_gguf

PROMPT = 40
F32, F64 = NDArray[np.float32], NDArray[np.float64]
# types whose inputs ggml rounds in groups of 32, and those in groups of 256
LEGACY = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")
K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
# where the float16 scales are in a block
SCALES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "MXFP4": (),
}


@pytest.fixture
def needs_kernels() -> None:
    if kernels.open_products().library is None:
        pytest.skip(kernels.open_products().problem)


@pytest.fixture
def needs_own_products() -> None:
    if not products.is_available():
        pytest.skip(products.unusable_reason())


def random_blocks(name: str, height: int, columns: int, seed: int) -> NDArray[np.uint8]:
    """Return weights of any bits, with scales near 0.01."""
    width, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (height, columns // width, size), dtype=np.uint8)
    for at in SCALES[name]:
        scales = random.uniform(0.005, 0.015, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    if name == "MXFP4":
        blocks[:, :, 0] = random.integers(118, 124, blocks.shape[:2])
    return blocks.reshape(height, -1)


def rounded(inputs: F32, name: str) -> F64:
    """Return inputs as ggml rounds them: 8 bits of each group's largest."""
    group = 32 if name in LEGACY else 256
    parts = inputs.reshape(len(inputs), -1, group).astype(np.float64)
    largest = np.abs(parts).max(-1, keepdims=True)
    scale = largest / 127
    if group == 32:
        scale = scale.astype(np.float32).astype(np.float16).astype(np.float64)
    whole = np.rint(np.divide(parts * 127, largest, out=np.zeros_like(parts), where=largest > 0))
    return (whole * scale).reshape(inputs.shape)


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("name", LEGACY + K_QUANTS)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 17])
def test_products_equal_those_of_decoded_weights_and_rounded_inputs(name: str, rows: int) -> None:
    kind = gguf.GGMLQuantizationType[name]
    for height, columns in ((8, 256), (24, 768), (40, 1792)):
        blocks = random_blocks(name, height, columns, seed=height)
        inputs = np.random.default_rng(1).normal(size=(rows, columns)).astype(np.float32)
        inputs[0, : columns // 2] = 0
        found = products.multiply(int(kind), blocks, inputs)
        assert found is not None
        decoded = gguf.quants.dequantize(blocks, kind).astype(np.float64)
        exact = rounded(inputs, name) @ decoded.T
        # a half is rounded up or down by the last bit of a quotient
        assert np.abs(found - exact).max() < 2e-3 * np.abs(exact).max()
        assert np.median(np.abs(found - exact)) < 1e-5 * np.abs(exact).max()


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("name", LEGACY + K_QUANTS)
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
def test_the_largest_weights_and_inputs_do_not_overflow(name: str, byte: int) -> None:
    kind, columns = gguf.GGMLQuantizationType[name], 512
    blocks = random_blocks(name, 8, columns, seed=0)
    width, size = gguf.GGML_QUANT_SIZES[kind]
    parts = blocks.reshape(8, columns // width, size)
    kept = {at + i for at in SCALES[name] for i in (0, 1)} | ({0} if name == "MXFP4" else set())
    parts[:, :, [at for at in range(size) if at not in kept]] = byte
    signs = np.where(np.arange(columns) % 3 == 0, -1, 1).astype(np.float32)
    for inputs in (
        np.ones((1, columns), np.float32),
        -np.ones((4, columns), np.float32),
        signs[None],
    ):
        found = products.multiply(int(kind), blocks, inputs)
        assert found is not None
        exact = rounded(inputs, name) @ gguf.quants.dequantize(blocks, kind).astype(np.float64).T
        assert np.abs(found - exact).max() <= 1e-5 * np.abs(exact).max() + 1e-6


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("name", LEGACY + K_QUANTS)
def test_a_row_has_the_same_bits_beside_any_other_rows(name: str) -> None:
    kind = int(gguf.GGMLQuantizationType[name])
    blocks = random_blocks(name, 16, 1024, seed=2)
    inputs = np.random.default_rng(3).normal(size=(19, 1024)).astype(np.float32)
    together = products.multiply(kind, blocks, inputs)
    assert together is not None
    for count in (1, 2, 3, 4, 7, 8, 9):
        alone = products.multiply(kind, blocks, inputs[-count:])
        assert alone is not None
        np.testing.assert_array_equal(alone, together[-count:])


@pytest.mark.usefixtures("needs_kernels")
def test_a_height_that_is_no_multiple_of_eight_is_left_to_ggml() -> None:
    inputs = np.ones((1, 256), np.float32)
    assert products.multiply(12, random_blocks("Q4_K", 12, 256, seed=0), inputs) is None
    assert products.multiply(0, np.zeros((8, 1024), np.uint8), inputs) is None  # float32


@pytest.fixture(scope="module", params=["Q4_0", "Q8_0", "Q4_K_M", "Q6_K"])
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tiny_gguf.llama(tmp_path_factory.mktemp("models") / "f32.gguf", hidden=256, layers=2)
    out = source.with_name("quantized.gguf")
    write.write_model(
        plan.plan_quantization(write.open_gguf(source), request.param), out, threads=1
    )
    return out


def logits(model: Model, passes: tuple[int, ...] = (PROMPT,), threads: int = 2) -> F32:
    """Return the logits of the tokens of a prompt, which is computed in passes of `passes` tokens
    each.
    """
    options = ContextOptions(
        *(256, PROMPT, PROMPT),
        n_outputs=PROMPT,
        n_threads=threads,
        n_threads_batch=threads,
        flash_attn="on",
        type_k="q8_0",
        type_v="q8_0",
    )
    tokens, start, found = [(7 + 31 * i) % 300 for i in range(sum(passes))], 0, []
    with open_context(model, options) as context:
        for count in passes:
            end = start + count
            rows = BatchRows(tokens[start:end], range(start, end), [0] * count, [True] * count)
            found += [row.logits.copy() for row in context.decode(rows)]
            start = end
    return np.stack(found)


def repacked_bytes(model: Model) -> int:
    with open_context(model, ContextOptions(256)) as context:
        breakdown = context.memory_breakdown()
    assert breakdown is not None
    return breakdown.repacked_bytes


@pytest.mark.usefixtures("needs_own_products")
def test_a_model_has_nearly_the_logits_of_ggmls_products(quantized: Path) -> None:
    ggmls = replace(ON_HOST, ggml_products=True)
    matrices = [
        tensor
        for tensor in gguf.GGUFReader(quantized).tensors
        if len(tensor.shape) == 2 and tensor.shape[1] % 8 == 0
    ]
    with open_model(quantized, ON_HOST) as model, open_model(quantized, ggmls) as other:
        assert repacked_bytes(model) == sum(tensor.n_bytes for tensor in matrices)
        found, expected = logits(model), logits(other)
        again = logits(model)
    assert np.square(found - expected).sum() < 1e-3 * np.square(expected).sum()
    np.testing.assert_array_equal(found, again)  # also while the other model is loaded


@pytest.mark.usefixtures("needs_own_products")
def test_ggml_keeps_its_own_layouts_for_few_types(quantized: Path) -> None:
    with open_model(quantized, replace(ON_HOST, ggml_products=True)) as model:
        has_layout = repacked_bytes(model) > 0
    kinds = {tensor.tensor_type.name for tensor in gguf.GGUFReader(quantized).tensors}
    assert has_layout == bool(kinds & {"Q4_0", "Q4_K"})


@pytest.mark.usefixtures("needs_own_products")
def test_logits_do_not_depend_on_the_size_of_passes_or_the_threads(quantized: Path) -> None:
    with open_model(quantized, ON_HOST) as model:
        together = logits(model)
        for passes in ((1,) * 5, (2, 3, 4), (8, 1), (20, 20)):
            for threads in (1, 2, 3):
                found = logits(model, passes, threads)
                np.testing.assert_array_equal(found, together[: sum(passes)])


@pytest.mark.usefixtures("needs_own_products")
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K_M"])
def test_experts_have_nearly_the_logits_of_ggmls_products(
    kind: str, threads: int, tmp_path: Path
) -> None:
    source = tiny_gguf.llama(tmp_path / "f32.gguf", layers=2, experts=8)
    path = source.with_name("quantized.gguf")
    write.write_model(plan.plan_quantization(write.open_gguf(source), kind), path, threads=1)
    with (
        open_model(path, ON_HOST) as model,
        open_model(path, replace(ON_HOST, ggml_products=True)) as other,
    ):
        assert repacked_bytes(model) > sum(
            tensor.n_bytes for tensor in gguf.GGUFReader(path).tensors if "exps" in tensor.name
        )
        for passes in ((PROMPT,), (1, 3, 9)):
            found, expected = logits(model, passes, threads), logits(other, passes, threads)
            assert np.square(found - expected).sum() < 1e-3 * np.square(expected).sum()
