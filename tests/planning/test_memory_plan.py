"""The planned bytes equal the bytes that llama.cpp allocates."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from llmcli.hardware import host
from llmcli.planning import memory_plan
from llmcli.runtime.binding import dry_run
from llmcli.runtime.binding.context import Context
from llmcli.runtime.binding.context_options import ContextOptions
from quant.convert import checkpoint_source
from quant.model_file import read_header
from quant.quantize import plan, write
from tests.quant import families, tiny_gguf

PARTS = ("weights", "repacked", "kv", "compute", "output", "total")
# Contexts: tokens, type K, type V, sequences, one pool, micro-batch, flash attention.
CONTEXTS = [
    ContextOptions(300), ContextOptions(2048, 512, 128, 1, 1, 1, "q8_0", "q8_0"),
    ContextOptions(2048, 512, 64, 4, 1, 1, "q8_0", "q4_0"),
    ContextOptions(3000, 512, 64, 3, 1, 1, "f16", "f16", "auto", unified=False),
    ContextOptions(1024, 256, 32, 2, 1, 1, "f32", "f16", "off"),
]  # fmt: skip


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    """A Llama whose matrices llama.cpp lays out anew, its head tied to the embedding."""
    folder = tmp_path_factory.mktemp("packed")
    whole = tiny_gguf.llama(folder / "whole.gguf", layers=3, tied=True)
    write.write_model(
        plan.plan_quantization(write.open_gguf(whole), "Q4_0"),
        folder / "q4_0.gguf",
        threads=1,
    )
    return folder / "q4_0.gguf"


def compare(path: Path, options: ContextOptions) -> memory_plan.MemoryPlan:
    header = read_header.read_header(path)
    with memory_plan.open_memory_planner(header, options, 0) as planner:
        told = planner.memory_plan()
    found = memory_plan.measure_loaded(header, options, 0)
    assert (told.n_ctx, told.sums.total) == (found.n_ctx, found.sums.total)
    for part in PARTS:
        assert getattr(told.sums, part) == getattr(found.sums, part), part
    if told.cache:
        assert told.cache.nbytes == found.sums.kv
    assert told.process_bytes
    assert found.process_bytes
    return told


@pytest.mark.parametrize("options", CONTEXTS)
def test_a_llama_whose_weights_are_laid_out_anew(packed, options):
    told = compare(packed, options)
    assert told.cache is not None
    assert told.fits
    header = read_header.read_header(packed)
    (share,) = told.devices
    assert share.weights is not None
    assert share.droppable is not None
    assert share.weights <= header.path.stat().st_size
    # Which matrices it copies depends on the CPU; what stays in the map and what goes make up the
    # file.
    assert bool(share.repacked) == bool(share.droppable)


@pytest.mark.parametrize("options", CONTEXTS)
def test_a_sliding_window(tmp_path, options):
    told = compare(tiny_gguf.gemma3(tmp_path / "m.gguf", hidden=128, layers=7), options)
    assert told.cache is not None
    assert len({layer.cells for layer in told.cache.layers}) == (1 if options.n_ctx == 300 else 2)


def test_state_that_is_not_a_cache_is_counted_and_has_no_layers(tmp_path):
    told = compare(tiny_gguf.mamba(tmp_path / "m.gguf"), ContextOptions(512))
    assert told.cache is None
    assert told.sums.kv


def test_several_files_are_mapped_each_from_its_first_tensor_to_its_last(tmp_path):
    whole = tiny_gguf.llama(tmp_path / "whole.gguf", layers=3)
    split = plan.plan_quantization(write.open_gguf(whole), "Q8_0", max_shard_bytes=300_000)
    report = write.write_model(split, tmp_path / "part.gguf", threads=1)
    assert len(read_header.read_header(report.out).files) > 1
    compare(report.out, ContextOptions(512))


@pytest.mark.parametrize("name", ["deepseek v2, compressed queries", "gpt-oss"])
def test_compressed_keys_and_experts(tmp_path, name):
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
def test_smollm2(smollm2):
    compare(smollm2, replace(CONTEXTS[1], n_threads=2))


@pytest.mark.model
def test_gemma3(gemma3):
    compare(gemma3, CONTEXTS[2])


def test_nothing_is_allocated(packed):
    """A cache of a gibibyte is planned within a tenth of it."""
    header, before = read_header.read_header(packed), host.resident_memory()
    assert before
    with memory_plan.open_memory_planner(header, ContextOptions(1 << 20), 0) as planner:
        told = planner.memory_plan()
    after = host.resident_memory()
    assert after
    assert (told.sums.kv or 0) > 1 << 30
    assert after - before < (told.sums.kv or 0) / 10


@pytest.mark.parametrize(
    "options", [ContextOptions(512), ContextOptions(1024, 64, 64, 2, unified=False)]
)
def test_the_largest_context_fits_and_the_next_does_not(packed, monkeypatch, options):
    header = read_header.read_header(packed)
    monkeypatch.setattr(host, "available_memory", lambda: 24 << 20)
    with memory_plan.open_memory_planner(header, options, 0) as planner:
        longest = {kind: planner.largest_context(kind) for kind in memory_plan.PLANNED_CACHE_TYPES}
    assert all(longest.values())
    assert longest["f16"] < longest["q8_0"] < longest["q4_0"]  # type: ignore[operator]
    step = 256 * (1 if options.unified else options.n_seq_max)
    for kind, cells in longest.items():
        for more, fits in ((0, True), (step, False)):
            wanted = replace(options, n_ctx=cells + more, type_k=kind, type_v=kind)  # type: ignore[operator]
            with memory_plan.open_memory_planner(header, wanted, 0) as planner:
                assert planner.memory_plan().fits is fits, (kind, cells, more)


def test_where_nothing_fits_the_largest_context_is_none(packed, monkeypatch):
    monkeypatch.setattr(host, "available_memory", lambda: 1000)
    with memory_plan.open_memory_planner(
        read_header.read_header(packed), ContextOptions(512), 0
    ) as planner:
        assert planner.largest_context("f16") == 0
        assert planner.memory_plan().fits is False


def test_a_type_that_the_heads_do_not_fill_has_no_largest_context(stories_gguf):
    with memory_plan.open_memory_planner(
        read_header.read_header(stories_gguf), ContextOptions(256), 0
    ) as planner:
        assert [planner.supports_cache_type(kind) for kind in memory_plan.PLANNED_CACHE_TYPES] == [
            True,
            False,
            False,
        ]
        assert planner.largest_context("q8_0") is None


def test_what_this_build_does_not_tell_is_unknown_and_never_a_guess(packed, monkeypatch):
    monkeypatch.setattr(Context, "memory_breakdown", lambda self: None)
    monkeypatch.setattr(dry_run.DryRun, "tensor_buffers", lambda self: None)
    header = read_header.read_header(packed)
    with memory_plan.open_memory_planner(header, ContextOptions(512), 0) as planner:
        told = planner.memory_plan()
        assert planner.largest_context("f16") is None
    assert [told.sums.repacked, told.sums.compute, told.sums.total] == [None] * 3
    assert (told.sums.weights, told.process_bytes, told.fits) == (
        header.tensor_bytes,
        None,
        None,
    )
    assert told.cache is not None
    monkeypatch.setattr(host, "available_memory", lambda: header.tensor_bytes - 1)
    with memory_plan.open_memory_planner(header, ContextOptions(512), 0) as planner:
        assert planner.memory_plan().fits is False  # what is known is too much already


def test_without_proc_the_machine_s_figures_are_unknown(packed, monkeypatch):
    monkeypatch.setattr(host, "available_memory", lambda: None)
    monkeypatch.setattr(host, "resident_memory", lambda: None)
    with memory_plan.open_memory_planner(
        read_header.read_header(packed), ContextOptions(512), 0
    ) as planner:
        told = planner.memory_plan()
        assert planner.largest_context("f16") is None
    assert (told.overhead, told.process_bytes, told.fits) == (None, None, None)
    assert told.sums.total


def test_a_context_too_long_to_rehearse_is_told_by_arithmetic(packed):
    with memory_plan.open_memory_planner(
        read_header.read_header(packed), ContextOptions(2_000_000_000), 0
    ) as planner:
        told = planner.memory_plan()
    assert told.cache is not None
    assert told.sums.kv == told.cache.nbytes
    assert told.sums.compute is None


def test_the_last_step_with_room_is_found_wherever_the_line_bends():
    chance = random.Random(5)
    for _ in range(300):
        most, bend = chance.randint(2, 400), chance.randint(1, 400)
        flat, steep, start = chance.randint(0, 3), chance.randint(1, 90), chance.randint(-5, 9000)

        def room(n: int) -> int:
            return start - flat * n - steep * max(0, n - bend)  # noqa: B023

        expected = max([n for n in range(1, most + 1) if room(n) >= 0], default=0)
        assert memory_plan.largest_fitting(room, most) == expected
