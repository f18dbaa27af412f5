"""llmcli's matrix products equal numpy's on decoded weights, do not depend on the other rows, and
are more exact than ggml's.
"""

import ctypes
import re
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmcli.errors import UserError
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.contexts.pooled_context import PooledOptions, open_pooled_context
from llmcli.runtime.binding.kernels import gemm
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.placement import devices
from llmcli.runtime.binding.placement.model_placement import ON_HOST
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.reproducible import with_required_options
from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.runner import open_runner
from quant.native import ggml
from quant.quantize import plan, write
from tests.quant import tiny_gguf

F32 = NDArray[np.float32]
# with weights as they are in the file, which these products read
FILE_LAYOUT = replace(ON_HOST, ggml_products=True)
TYPES = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8}  # enum ggml_type
COLUMNS, PROMPT = 96, 150
MAX_UNPACKED_ROWS = 8  # FEWEST of gemm.c
UNREACHED_ROWS = 1 << 20  # more rows than any pass has


def random_floats(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def bfloat16(values: F32) -> NDArray[np.float64]:
    """Return the values rounded to bfloat16, to the nearest, ties to even."""
    bits = values.view(np.uint32)
    return (
        ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000)
        .astype(np.uint32)
        .view(np.float32)
        .astype(np.float64)
    )


@pytest.fixture
def needs_own_products() -> None:
    if (
        gemm.multiply(
            TYPES["Q8_0"],
            ggml.encode(random_floats(1, 32), "Q8_0", label=""),
            random_floats(1, 32),
            1,
        )
        is None
    ):
        pytest.skip("this CPU has no bfloat16, or this build does not contain gemm.c")


@pytest.mark.usefixtures("needs_own_products")
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("rows", [1, 4, 5, 8, 9, 16, 33, 49, 100])
def test_products_equal_those_of_decoded_weights_and_bfloat16_inputs(kind: str, rows: int) -> None:
    for height in (1, 31, 77):
        blocks = ggml.encode(random_floats(height, COLUMNS), kind, label="")
        inputs = random_floats(rows, COLUMNS, seed=1)
        found = gemm.multiply(TYPES[kind], blocks, inputs, 2)
        assert found is not None
        exact = bfloat16(inputs) @ bfloat16(ggml.decode(blocks, kind, COLUMNS, label="")).T
        assert np.abs(found - exact).max() < 1e-5 * np.abs(exact).max()


@pytest.mark.usefixtures("needs_own_products")
def test_a_row_has_the_same_bits_with_any_other_rows_and_any_number_of_threads() -> None:
    blocks, inputs = (
        ggml.encode(random_floats(200, COLUMNS), "Q4_1", label=""),
        random_floats(60, COLUMNS, seed=1),
    )
    packed = gemm.multiply(TYPES["Q4_1"], blocks, inputs, 1)
    assert packed is not None
    # unpacked rows are summed in another order
    unpacked = gemm.multiply(TYPES["Q4_1"], blocks, inputs[:MAX_UNPACKED_ROWS], 1)
    assert unpacked is not None
    assert not np.array_equal(unpacked, packed[:MAX_UNPACKED_ROWS])
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
        expected = unpacked if last - first <= MAX_UNPACKED_ROWS else packed
        assert np.array_equal(part, expected[first:last])


def test_other_types_are_left_to_ggml() -> None:
    blocks = ggml.encode(random_floats(8, 256), "Q6_K", label="")
    assert gemm.multiply(14, blocks, random_floats(40, 256), 1) is None


@pytest.fixture(scope="module")
def f32_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.llama(tmp_path_factory.mktemp("gemm") / "f32.gguf", hidden=64, ff=96, layers=3)


@pytest.fixture(scope="module")
def q8_0_model(f32_model: Path) -> Path:
    """A quantized model, whose products llmcli can compute."""
    out = f32_model.with_name("q8_0.gguf")
    write.write_model(plan.plan_quantization(write.open_gguf(f32_model), "Q8_0"), out, threads=1)
    return out


@pytest.fixture(scope="module")
def decoded_model(f32_model: Path, q8_0_model: Path) -> Path:
    """A float model with the same weights, whose products are exact."""
    out = f32_model.with_name("again.gguf")
    write.write_model(plan.plan_quantization(write.open_gguf(q8_0_model), "F32"), out, threads=1)
    return out


def logits(path: Path, min_rows: int, passes: tuple[int, ...] = (PROMPT,)) -> F32:
    """Return the logits of all tokens of a prompt, which is computed in passes of `passes` tokens
    each. `min_rows`: `gemm_min_rows` of the context.
    """
    tokens, start, found = [(7 + 31 * i) % 300 for i in range(sum(passes))], 0, []
    options = ContextOptions(
        256,
        n_outputs=max(passes),
        n_threads=2,
        n_threads_batch=2,
        flash_attn="on",
        gemm_min_rows=min_rows,
    )
    with (
        open_model(path, FILE_LAYOUT) as model,
        open_context(model, options) as context,
    ):
        for count in passes:
            wants = [True] * count
            end = start + count
            rows = BatchRows(tokens[start:end], range(start, end), [0] * count, wants)
            found += [row.logits.copy() for row in context.decode(rows)]
            start = end
    return np.stack(found)


def relative_error(found: F32, exact: F32) -> float:
    return float(np.square(found - exact).sum() / np.square(exact).sum())


@pytest.mark.usefixtures("needs_own_products")
def test_logits_are_closer_to_those_of_float_weights_than_ggmls(
    q8_0_model: Path, decoded_model: Path
) -> None:
    exact = logits(decoded_model, 0)
    own_error = relative_error(logits(q8_0_model, 4), exact)
    ggml_error = relative_error(logits(q8_0_model, 0), exact)
    assert 0 < own_error < 0.5 * ggml_error


@pytest.mark.usefixtures("needs_own_products")
def test_passes_with_fewer_rows_are_computed_by_ggml(q8_0_model: Path) -> None:
    ggml_logits = logits(q8_0_model, 0)
    assert np.array_equal(logits(q8_0_model, UNREACHED_ROWS), ggml_logits)
    assert not np.array_equal(logits(q8_0_model, PROMPT), ggml_logits)
    assert np.array_equal(
        logits(q8_0_model, gemm.MIN_PROMPT_ROWS, (20, 9, 1)), logits(q8_0_model, 0, (20, 9, 1))
    )


@pytest.mark.usefixtures("needs_own_products")
def test_each_context_has_its_own_setting(q8_0_model: Path) -> None:
    """Three contexts of one model are open at the same time and compute in turn."""
    minimums = 4, 0, UNREACHED_ROWS
    expected = [logits(q8_0_model, min_rows) for min_rows in minimums]
    assert not np.array_equal(expected[0], expected[1])
    options = ContextOptions(256, n_outputs=PROMPT, n_threads=2, n_threads_batch=2, flash_attn="on")
    tokens = [(7 + 31 * i) % 300 for i in range(PROMPT)]
    batch = BatchRows(tokens, range(PROMPT), [0] * PROMPT, [True] * PROMPT)
    with open_model(q8_0_model, FILE_LAYOUT) as model, ExitStack() as stack:
        contexts = [
            stack.enter_context(open_context(model, replace(options, gemm_min_rows=min_rows)))
            for min_rows in minimums
        ]
        for _ in range(2):
            for context, wanted in zip(contexts, expected, strict=True):
                context.clear()
                rows = context.decode(batch)
                assert np.array_equal(np.stack([row.logits for row in rows]), wanted)


@pytest.mark.usefixtures("needs_own_products")
def test_ggml_and_reproducible_modes_do_not_use_own_products(q8_0_model: Path) -> None:
    """The logits of a prompt show which code computed them."""
    prompt = [(7 + 31 * i) % 300 for i in range(PROMPT)]
    found = {}
    for name, options in {
        "auto": RunOptions(256, 2),
        "ggml": RunOptions(256, 2, gemm="ggml"),
    }.items():
        with open_runner(q8_0_model, options, raw=True, placement=FILE_LAYOUT) as runner:
            wants = [False] * (PROMPT - 1) + [True]
            (row,) = runner.context.decode(BatchRows(prompt, range(PROMPT), [0] * PROMPT, wants))
            found[name] = row.logits.copy()
    assert not np.array_equal(found["auto"], found["ggml"])
    assert with_required_options(RunOptions()).gemm == "ggml"


@pytest.mark.usefixtures("needs_own_products")
def test_embeddings_use_own_products(q8_0_model: Path, decoded_model: Path) -> None:
    """The error of the vectors shows which code computed them."""
    exact = token_vectors(decoded_model, 0)
    own, ggmls = token_vectors(q8_0_model, 4), token_vectors(q8_0_model, 0)
    assert 0 < relative_error(own, exact) < 0.5 * relative_error(ggmls, exact)


def token_vectors(path: Path, min_rows: int) -> F32:
    """Return the vectors of all tokens of a text. `min_rows`: `gemm_min_rows` of the context."""
    options = PooledOptions(
        PROMPT,
        PROMPT,
        max_texts=1,
        max_vector_rows=PROMPT,
        pooling="none",
        flash_attn="on",
        gemm_min_rows=min_rows,
    )
    tokens = [(7 + 31 * i) % 300 for i in range(PROMPT)]
    batch = BatchRows(tokens, range(PROMPT), [0] * PROMPT, [True] * PROMPT)
    with open_model(path, FILE_LAYOUT) as model, open_pooled_context(model, options) as context:
        return context.compute_vectors(batch)[0]


@pytest.mark.usefixtures("needs_own_products")
def test_devices_are_counted_while_contexts_are_created(q8_0_model: Path) -> None:
    """A context registers a device for a moment, which no other thread may see."""
    stop, counts = threading.Event(), set[int]()

    def count_devices() -> None:
        while not stop.is_set():
            counts.add(len(devices.list_devices()))

    expected = len(devices.list_devices())
    watcher = threading.Thread(target=count_devices)
    with open_model(q8_0_model, FILE_LAYOUT) as model:
        watcher.start()
        try:
            for _ in range(5):
                with open_context(model, ContextOptions(64, 32, 32, gemm_min_rows=4)):
                    pass
        finally:
            stop.set()
            watcher.join()
    assert counts == {expected}


@pytest.mark.usefixtures("needs_own_products")
def test_no_device_is_asked_for_its_memory(
    q8_0_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is a request to each worker."""
    with open_model(q8_0_model, FILE_LAYOUT) as model:
        monkeypatch.setattr(devices, "list_devices", None)
        with open_context(model, ContextOptions(64, 32, 32, gemm_min_rows=4)) as context:
            assert context._begin_pass is not None


def test_drafts_have_the_minimum_rows_of_a_single_conversation() -> None:
    assert gemm.choose_min_rows("auto", 4, has_drafts=False) == gemm.MIN_ANSWER_ROWS
    assert (
        gemm.choose_min_rows("auto", 4, has_drafts=True)
        == gemm.choose_min_rows("auto", 1, has_drafts=False)
        == gemm.MIN_PROMPT_ROWS
    )
    assert gemm.choose_min_rows("ggml", 4, has_drafts=False) == 0


def test_the_copied_structures_are_those_of_the_installed_ggml() -> None:
    """With another version the products would be off."""
    header = Path(gemm.__file__).with_name("ggml_backend.h").read_text()
    assert f'#define GGML_VERSION "{gemm.ggml_version()}"' in header
    library = ggml.open_library()
    library.ggml_op_name.restype = library.ggml_type_name.restype = ctypes.c_char_p
    for kind, function in (("OP", library.ggml_op_name), ("TYPE", library.ggml_type_name)):
        numbers = re.findall(rf"GGML_{kind}_(\w+) = (\d+)", header)
        assert len(numbers) == {"OP": 8, "TYPE": 15}[kind]
        for name, number in numbers:
            assert function(int(number)).decode().upper() == name.upper()


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(UserError, match="mode 'fast'") as refused:
        gemm.check_mode("fast")
    assert refused.value.hint == "--gemm takes auto or ggml"
