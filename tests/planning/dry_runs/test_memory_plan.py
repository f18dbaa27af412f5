"""Memory plans: the planned bytes equal the bytes that llama.cpp allocates."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from llmcli.hardware import host
from llmcli.planning.dry_runs import memory_plan
from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context, open_prediction_context
from llmcli.runtime.binding.contexts.prediction_context import prediction_options
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.placement.model_placement import ON_HOST
from llmcli.runtime.binding.trials import dry_run
from quant.convert import checkpoint_source
from quant.model_file import read_header
from quant.quantize import plan, write
from tests.quant import families, predicting_checkpoint, tiny_gguf

FIELDS = ("weights", "repacked", "kv", "compute", "output", "total")
# They differ in length, cache types, sequences, pool, micro-batch and flash attention.
CONTEXTS = [
    ContextOptions(300), ContextOptions(2048, 512, 128, 1, 1, 1, "q8_0", "q8_0"),
    ContextOptions(2048, 512, 64, 4, 1, 1, "q8_0", "q4_0"),
    ContextOptions(3000, 512, 64, 3, 1, 1, "f16", "f16", "auto", unified=False),
    ContextOptions(1024, 256, 32, 2, 1, 1, "f32", "f16", "off"),
]  # fmt: skip


@pytest.fixture(scope="module")
def q4_0_model(tmp_path_factory) -> Path:
    """A Llama in Q4_0, whose matrices llama.cpp repacks, with a head tied to the embedding."""
    folder = tmp_path_factory.mktemp("q4_0_model")
    floats = tiny_gguf.llama(folder / "floats.gguf", layers=3, tied=True)
    write.write_model(
        plan.plan_quantization(write.open_gguf(floats), "Q4_0"),
        folder / "q4_0.gguf",
        threads=1,
    )
    return folder / "q4_0.gguf"


def compare(path: Path, options: ContextOptions) -> memory_plan.MemoryPlan:
    """Assert that the plan of a context equals the measured memory. Return the plan."""
    header = read_header.read_header(path)
    with memory_plan.open_memory_planner(header, options, ON_HOST) as planner:
        planned = planner.memory_plan()
    measured = memory_plan.measure_loaded(header, options, ON_HOST)
    assert (planned.n_ctx, planned.sums.total) == (measured.n_ctx, measured.sums.total)
    for field in FIELDS:
        assert getattr(planned.sums, field) == getattr(measured.sums, field), field
    if planned.cache:
        assert planned.cache.nbytes == measured.sums.kv
    assert planned.process_bytes
    assert measured.process_bytes
    return planned


@pytest.mark.parametrize("options", CONTEXTS)
def test_plan_of_a_model_with_repacked_weights(q4_0_model, options):
    planned = compare(q4_0_model, options)
    assert planned.cache is not None
    assert planned.fits
    header = read_header.read_header(q4_0_model)
    (share,) = planned.devices
    assert share.weights is not None
    assert share.droppable is not None
    assert share.weights <= header.path.stat().st_size
    # the CPU decides which matrices are repacked; the mapped originals of these are not read again
    assert bool(share.repacked) == bool(share.droppable)


@pytest.mark.parametrize("options", CONTEXTS)
def test_plan_of_a_model_with_a_sliding_window(tmp_path, options):
    planned = compare(tiny_gguf.gemma3(tmp_path / "m.gguf", hidden=128, layers=7), options)
    assert planned.cache is not None
    assert len({layer.cells for layer in planned.cache.layers}) == (
        1 if options.n_ctx == 300 else 2
    )


def test_plan_of_a_recurrent_model_counts_its_state_but_has_no_cache_layers(tmp_path):
    planned = compare(tiny_gguf.mamba(tmp_path / "m.gguf"), ContextOptions(512))
    assert planned.cache is None
    assert planned.sums.kv


def test_plan_of_a_model_in_several_files(tmp_path):
    floats = tiny_gguf.llama(tmp_path / "floats.gguf", layers=3)
    split = plan.plan_quantization(write.open_gguf(floats), "Q8_0", max_shard_bytes=300_000)
    report = write.write_model(split, tmp_path / "shard.gguf", threads=1)
    assert len(read_header.read_header(report.out).files) > 1
    compare(report.out, ContextOptions(512))


@pytest.mark.parametrize("name", ["deepseek v2, compressed queries", "gpt-oss"])
def test_plan_of_models_with_compressed_keys_and_experts(tmp_path, name):
    pytest.importorskip("transformers", reason="transformers is not installed: it makes the models")
    (case,) = (case for case in families.cases() if case.name == name)
    folder, out = families.build(case, tmp_path / "model"), tmp_path / "model.gguf"
    write.write_model(
        plan.plan_quantization(checkpoint_source.open_checkpoint(folder), "Q8_0"),
        out,
        threads=1,
    )
    for options in (CONTEXTS[0], replace(CONTEXTS[1], type_k="f16", type_v="f16"), CONTEXTS[3]):
        assert compare(out, options).cache


@pytest.mark.model
def test_plan_of_smollm2(smollm2):
    compare(smollm2, replace(CONTEXTS[1], n_threads=2))


@pytest.mark.model
def test_plan_of_gemma3(gemma3):
    compare(gemma3, CONTEXTS[2])


def test_planning_allocates_no_cache(q4_0_model):
    """Planning a cache of more than a gibibyte takes less than a tenth of its size."""
    header, before = read_header.read_header(q4_0_model), host.resident_memory()
    assert before
    with memory_plan.open_memory_planner(header, ContextOptions(1 << 20), ON_HOST) as planner:
        planned = planner.memory_plan()
    after = host.resident_memory()
    assert after
    assert (planned.sums.kv or 0) > 1 << 30
    assert after - before < (planned.sums.kv or 0) / 10


@pytest.mark.parametrize(
    "options", [ContextOptions(512), ContextOptions(1024, 64, 64, 2, unified=False)]
)
def test_largest_context_fits_and_the_next_longer_one_does_not(q4_0_model, monkeypatch, options):
    header = read_header.read_header(q4_0_model)
    monkeypatch.setattr(host, "available_memory", lambda: 24 << 20)
    with memory_plan.open_memory_planner(header, options, ON_HOST) as planner:
        longest = {kind: planner.largest_context(kind) for kind in memory_plan.PLANNED_CACHE_TYPES}
    assert all(longest.values())
    assert longest["f16"] < longest["q8_0"] < longest["q4_0"]  # type: ignore[operator]
    step = 256 * (1 if options.unified else options.n_seq_max)
    for kind, cells in longest.items():
        for more, fits in ((0, True), (step, False)):
            longer = replace(options, n_ctx=cells + more, type_k=kind, type_v=kind)  # type: ignore[operator]
            with memory_plan.open_memory_planner(header, longer, ON_HOST) as planner:
                assert planner.memory_plan().fits is fits, (kind, cells, more)


def test_largest_context_is_0_if_nothing_fits(q4_0_model, monkeypatch):
    monkeypatch.setattr(host, "available_memory", lambda: 1000)
    with memory_plan.open_memory_planner(
        read_header.read_header(q4_0_model), ContextOptions(512), ON_HOST
    ) as planner:
        assert planner.largest_context("f16") == 0
        assert planner.memory_plan().fits is False


def test_largest_context_is_unknown_for_a_type_that_the_heads_do_not_support(stories_gguf):
    with memory_plan.open_memory_planner(
        read_header.read_header(stories_gguf), ContextOptions(256), ON_HOST
    ) as planner:
        assert [planner.supports_cache_type(kind) for kind in memory_plan.PLANNED_CACHE_TYPES] == [
            True,
            False,
            False,
        ]
        assert planner.largest_context("q8_0") is None


def test_sizes_that_llama_cpp_does_not_report_are_unknown(q4_0_model, monkeypatch):
    monkeypatch.setattr(Context, "memory_breakdown", lambda self: None)
    monkeypatch.setattr(dry_run.DryRun, "tensor_buffers", lambda self: None)
    header = read_header.read_header(q4_0_model)
    with memory_plan.open_memory_planner(header, ContextOptions(512), ON_HOST) as planner:
        planned = planner.memory_plan()
        assert planner.largest_context("f16") is None
    assert [planned.sums.repacked, planned.sums.compute, planned.sums.total] == [None] * 3
    assert (planned.sums.weights, planned.process_bytes, planned.fits) == (
        header.tensor_bytes,
        None,
        None,
    )
    assert planned.cache is not None
    monkeypatch.setattr(host, "available_memory", lambda: header.tensor_bytes - 1)
    with memory_plan.open_memory_planner(header, ContextOptions(512), ON_HOST) as planner:
        assert planner.memory_plan().fits is False  # the known weights alone are too large


def test_memory_of_the_machine_may_be_unknown(q4_0_model, monkeypatch):
    monkeypatch.setattr(host, "available_memory", lambda: None)
    monkeypatch.setattr(host, "resident_memory", lambda: None)
    with memory_plan.open_memory_planner(
        read_header.read_header(q4_0_model), ContextOptions(512), ON_HOST
    ) as planner:
        planned = planner.memory_plan()
        assert planner.largest_context("f16") is None
    assert (planned.overhead, planned.process_bytes, planned.fits) == (None, None, None)
    assert planned.sums.total


def test_plan_of_a_context_too_long_for_a_dry_run_has_only_weights_and_cache(q4_0_model):
    with memory_plan.open_memory_planner(
        read_header.read_header(q4_0_model), ContextOptions(2_000_000_000), ON_HOST
    ) as planner:
        planned = planner.memory_plan()
    assert planned.cache is not None
    assert planned.sums.kv == planned.cache.nbytes
    assert planned.sums.compute is None


def test_largest_fitting_size_is_found_for_lines_with_a_bend():
    random_numbers = random.Random(5)
    for _ in range(300):
        limit, bend = random_numbers.randint(2, 400), random_numbers.randint(1, 400)
        slope, steeper_slope = random_numbers.randint(0, 3), random_numbers.randint(1, 90)
        start = random_numbers.randint(-5, 9000)

        def free_after(n: int) -> int:
            return start - slope * n - steeper_slope * max(0, n - bend)  # noqa: B023

        expected = max([n for n in range(1, limit + 1) if free_after(n) >= 0], default=0)
        assert memory_plan.largest_fitting(free_after, limit) == expected


def test_plan_counts_prediction_layers_and_their_context(tmp_path):
    out = predicting_checkpoint.write_gguf(tmp_path / "model.gguf", "Q8_0")
    header = read_header.read_header(out)
    options = ContextOptions(512, 128, 64, n_rs_seq=3, outputs_states=True)
    with memory_plan.open_memory_planner(header, options, ON_HOST) as planner:
        planned = planner.memory_plan().sums
    placement = ON_HOST.for_header(header)
    with (
        open_model(out, placement, load_mtp=True) as model,
        open_context(model, options) as context,
        open_prediction_context(model, context, prediction_options(options)) as prediction,
    ):
        both = context.memory_breakdown().with_context(prediction.memory_breakdown())
        assert planned.weights + planned.repacked == both.model_bytes
        assert planned.kv == both.context_bytes
        assert planned.compute == both.compute_bytes
        # a row of logits and the states of a batch; a row of logits and a state
        assert planned.output == 4 * (2 * model.n_vocab + 129 * model.n_embd)
    with memory_plan.open_memory_planner(
        header, replace(options, outputs_states=False), ON_HOST
    ) as planner:
        without = planner.memory_plan().sums
    assert without.weights < planned.weights
    assert without.kv < planned.kv
