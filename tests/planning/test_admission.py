"""The memory check before a run: which plans are accepted, refused or reduced, compared with dry
runs and with real runs.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from llmcli.errors import UserError
from llmcli.hardware import host, memory_limits
from llmcli.planning import admission
from llmcli.planning.dry_runs import memory_plan, nearest_fit
from llmcli.planning.dry_runs.run_plan import RunPlan
from llmcli.planning.prediction import upper_bound
from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.placement.model_placement import ON_HOST
from llmcli.runtime.draft_settings import NO_DRAFTING, DraftSettings
from llmcli.runtime.drafting.draft_files.heads_file import MEDUSA, HeadShapes
from llmcli.runtime.requests.request import RunOptions
from quant.model_file import read_header
from quant.quantize import write
from quant.quantize.plan import plan_quantization
from tests.fixtures.draft_heads import write_heads
from tests.quant import tiny_gguf

# With this many cells of 384 bytes (f16), the KV cache of the tiny model is larger than all else.
LONG = 65536
OPTIONS = RunOptions(LONG, 1, 1, batch_size=512, ubatch_size=64, gpu_layers="0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.llama(tmp_path_factory.mktemp("admit") / "tiny.gguf", layers=3)


@pytest.fixture(autouse=True)
def no_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reserve no memory for the growth of the process, so that the limits are exact."""
    monkeypatch.setattr(nearest_fit, "GROWTH_BYTES", 0)


def make_plan(model: Path, **changes: object) -> RunPlan:
    """Return a plan with a context of LONG tokens, with some fields changed."""
    plan = RunPlan(
        "tiny", read_header.read_header(model), OPTIONS, ON_HOST, NO_DRAFTING, is_ctx_requested=True
    )
    return replace(plan, **changes)  # type: ignore[arg-type]


def needed_bytes(plan: RunPlan, field: str = "total") -> int:
    """Return the sum of a field of DeviceMemory over all devices, from a dry run."""
    with nearest_fit.open_nearest_fit(plan) as dry_run:
        sizes = [getattr(share, field) for share in dry_run.device_memory(plan)]
    assert None not in sizes
    return sum(sizes)


def check(
    plan: RunPlan, memory: int, monkeypatch: pytest.MonkeyPatch, fit: str = ""
) -> tuple[RunPlan, list[str]]:
    """Check a plan on a machine with `memory` bytes. Return the accepted plan and the notes."""
    monkeypatch.setattr(host, "available_memory", lambda: memory)
    notes: list[str] = []
    return admission.check_memory(plan, fit, notes.append), notes


def test_plan_that_fits_is_not_changed(model, monkeypatch):
    plan = make_plan(model)
    assert check(plan, 1 << 40, monkeypatch) == (plan, [])
    assert check(plan, needed_bytes(plan), monkeypatch) == (plan, [])
    exact = needed_bytes(plan, "required")
    with pytest.raises(UserError, match="does not fit"):
        check(plan, exact - 1, monkeypatch)
    assert check(plan, exact // 2, monkeypatch, "off") == (plan, [])


def test_with_plenty_of_memory_there_is_no_dry_run(model, monkeypatch):
    monkeypatch.setattr(nearest_fit, "open_memory_planner", None)
    plan = make_plan(model)
    assert check(plan, 1 << 40, monkeypatch)[0] == plan


def test_error_names_the_nearest_settings_and_fit_applies_them(model, monkeypatch):
    plan = make_plan(model)
    memory = needed_bytes(make_plan(model, options=replace(OPTIONS, ctx_size=LONG // 2)))
    with pytest.raises(
        UserError, match="tiny with 65,536 tokens of context does not fit: KV cache "
    ) as caught:
        check(plan, memory, monkeypatch)
    assert caught.value.hint == (
        f"-c {LONG // 2} would fit (the model was trained on 64 tokens); --fit applies this"
    )
    accepted, notes = check(plan, memory, monkeypatch, "on")
    assert accepted == plan.with_changes(ctx_size=LONG // 2)
    assert notes == [f"--fit: {LONG // 2:,} tokens of context instead of {LONG:,}"]
    assert (
        needed_bytes(accepted)
        <= memory
        < needed_bytes(accepted.with_changes(ctx_size=LONG // 2 + 256))
    )


def test_smaller_cache_types_are_tried_before_a_very_short_context(model, monkeypatch):
    plan = make_plan(model)
    memory = needed_bytes(
        plan.with_changes(
            ctx_size=nearest_fit.MIN_USEFUL_TOKENS, cache_type_k="q8_0", cache_type_v="q8_0"
        )
    )
    accepted, notes = check(plan, memory, monkeypatch, "on")
    assert (accepted.options.cache_type_k, accepted.options.cache_type_v) == ("q8_0", "q8_0")
    assert accepted.options.ctx_size == nearest_fit.MIN_USEFUL_TOKENS
    assert notes == [
        "--fit: 2,048 tokens of context instead of 65,536, a q8_0 KV cache instead of f16"
    ]
    with pytest.raises(UserError) as caught:
        check(plan, memory, monkeypatch)
    assert caught.value.hint.startswith("-c 2048 -ctk q8_0 -ctv q8_0 would fit")
    least = needed_bytes(
        plan.with_changes(ctx_size=256, cache_type_k="q4_0", cache_type_v="q4_0"), "required"
    )
    assert check(plan, least, monkeypatch, "on")[0].options.cache_type_k == "q4_0"
    with pytest.raises(UserError) as caught:
        check(plan, least - 1, monkeypatch, "on")
    assert caught.value.hint.startswith("no setting of this model fits")


def test_default_context_is_shortened_without_fit(model, monkeypatch):
    plan = make_plan(model, is_ctx_requested=False, slots=4)
    memory = needed_bytes(make_plan(model, options=replace(OPTIONS, ctx_size=4096)))
    accepted, notes = check(plan, memory, monkeypatch)
    assert (accepted.options.ctx_size, accepted.slots) == (4096, 1)
    assert notes == [
        "limited by the available memory: 4,096 tokens of context instead of 65,536; "
        "-c 65536 --fit off overrides this"
    ]
    small = needed_bytes(make_plan(model, options=replace(OPTIONS, ctx_size=512)))
    with pytest.raises(UserError, match="does not fit"):  # cache types change only with --fit
        check(plan, small, monkeypatch)


def test_fit_reduces_the_sequences_of_a_recurrent_model(tmp_path, monkeypatch):
    recurrent = tiny_gguf.mamba(tmp_path / "m.gguf")
    options = replace(OPTIONS, ctx_size=512)
    plan = make_plan(recurrent, options=options, slots=64, required_slots=64)
    memory = needed_bytes(make_plan(recurrent, options=options, slots=16, required_slots=16))
    accepted, notes = check(plan, memory, monkeypatch, "on")
    assert accepted.slots == 16
    assert "16 sequences instead of 64" in notes[0]
    with pytest.raises(UserError) as caught:
        check(plan, memory, monkeypatch)
    assert "16 sequences at once would fit" in caught.value.hint


def test_cached_branches_of_a_chat_are_given_up_first(model, monkeypatch):
    options = replace(OPTIONS, ctx_size=512)
    plan = make_plan(model, options=options, slots=64, is_ctx_requested=False)
    accepted, notes = check(plan, needed_bytes(plan.with_changes(slots=1)), monkeypatch)
    assert accepted == plan.with_changes(slots=1)
    assert notes == [
        "limited by the available memory: one branch of the chat; other branches are computed again; "
        "-c 512 --fit off overrides this"
    ]


def test_plan_is_accepted_if_llama_cpp_reports_no_sizes(model, monkeypatch):
    """As on macOS. A KV cache that is larger than the memory is still refused."""
    monkeypatch.setattr(Context, "memory_breakdown", lambda self: None)
    plan = make_plan(model)
    cache = upper_bound.predict_cache(plan.header, plan.context)
    assert cache
    assert check(plan, cache.nbytes, monkeypatch) == (plan, [])
    with pytest.raises(UserError, match="does not fit: KV cache"):
        check(plan, cache.nbytes - 1, monkeypatch)


def test_weights_of_draft_heads_count(model: Path, tmp_path: Path) -> None:
    write_heads(tmp_path / "h.gguf", HeadShapes(MEDUSA, 256, 300, 4, 1, 0, False), model)
    plan = make_plan(model)
    drafting = DraftSettings(model=tmp_path / "h.gguf").for_draft_file(plan.header)
    assert drafting.heads
    both, alone = replace(plan, drafting=drafting), plan
    assert needed_bytes(both, "weights") == needed_bytes(alone, "weights") + drafting.heads.nbytes


def test_memory_of_a_draft_model_counts(model, monkeypatch):
    alone, both = make_plan(model), make_plan(model, drafting=DraftSettings("off", model))
    assert needed_bytes(both) > 1.9 * needed_bytes(alone)
    with pytest.raises(UserError, match="65,536 tokens of context and a draft model does not fit"):
        check(both, needed_bytes(alone), monkeypatch)
    memory = needed_bytes(both) // 2
    accepted, _ = check(both, memory, monkeypatch, "on")
    assert needed_bytes(accepted) <= memory
    assert accepted.drafting == both.drafting


def test_mapped_weights_larger_than_the_memory_give_only_a_warning(tmp_path, monkeypatch):
    large = tiny_gguf.llama(tmp_path / "large.gguf", hidden=512, ff=2048, layers=4)
    plan = make_plan(large, options=replace(OPTIONS, ctx_size=256))
    memory = needed_bytes(plan, "required")
    assert memory < read_header.read_header(large).tensor_bytes  # floats are not repacked
    for fit in ("", "on"):  # no setting makes the weights smaller
        accepted, notes = check(plan, memory, monkeypatch, fit)
        assert accepted == plan
        (line,) = notes
        assert "expect the speed of the disk" in line


def test_weights_stay_in_the_layout_of_the_file_if_copies_do_not_fit(tmp_path, monkeypatch):
    source = tiny_gguf.llama(tmp_path / "float.gguf", hidden=512, ff=2048, layers=4)
    path = tmp_path / "quantized.gguf"
    quantization = plan_quantization(write.open_gguf(source), "Q4_0")  # copied on all processors
    write.write_model(quantization, path, threads=1)
    plan = make_plan(path, options=replace(OPTIONS, ctx_size=256))
    copied = needed_bytes(plan, "repacked")
    if not copied:
        pytest.skip("llama.cpp has no layout of its own for this processor")
    memory = needed_bytes(plan, "required")
    assert check(plan, memory, monkeypatch)[0] == plan
    accepted, notes = check(plan, memory - copied // 2, monkeypatch)
    assert accepted == replace(plan, placement=replace(ON_HOST, repack=False))
    assert any("the weights stay in the layout of the file" in line for line in notes)


def test_requested_context_that_is_only_slow_is_changed_only_by_fit(model, monkeypatch):
    plan, memory = make_plan(model), needed_bytes(make_plan(model), "required")
    accepted, (line,) = check(plan, memory, monkeypatch)
    assert accepted == plan
    assert "expect the speed of the disk" in line
    accepted, notes = check(plan, memory, monkeypatch, "on")
    assert LONG > (accepted.options.ctx_size or 0) > LONG // 2
    assert len(notes) == 1


def test_context_too_long_for_a_dry_run_is_refused_by_its_predicted_cache(model, monkeypatch):
    huge = make_plan(model, options=replace(OPTIONS, ctx_size=2_000_000_000))
    with pytest.raises(
        UserError, match=r"2,000,000,000 tokens of context does not fit: KV cache 2\.8 TiB"
    ) as caught:
        check(huge, 1 << 28, monkeypatch)
    assert "would fit" in caught.value.hint
    monkeypatch.setattr(host, "available_memory", lambda: None)
    assert admission.check_memory(huge, "", print) == huge  # unknown memory: accepted


@pytest.mark.parametrize("make", [tiny_gguf.llama, tiny_gguf.gemma3, tiny_gguf.mamba])
@pytest.mark.parametrize("flash", ["auto", "off"])
def test_upper_bound_is_above_the_dry_run(tmp_path, make, flash):
    header = read_header.read_header(make(tmp_path / "m.gguf"))
    for options in (
        ContextOptions(256, flash_attn=flash),
        ContextOptions(8192, 2048, 512, 4, flash_attn=flash),
        ContextOptions(
            4096, 64, 64, 16, type_k="f32", flash_attn=flash, unified=False, n_outputs=16
        ),
    ):
        with memory_plan.open_memory_planner(header, options, ON_HOST) as planner:
            total = planner.memory_plan().sums.total
        assert total is not None
        assert total <= upper_bound.upper_bound_bytes(header, options)


@pytest.mark.model
def test_upper_bound_is_above_the_dry_run_for_real_models(smollm2, gemma3):
    for path in (smollm2, gemma3):
        header = read_header.read_header(path)
        for options in (
            ContextOptions(8192, n_seq_max=4),
            ContextOptions(1024, flash_attn="off", n_outputs=16),
        ):
            with memory_plan.open_memory_planner(header, options, ON_HOST) as planner:
                assert (planner.memory_plan().sums.total or 0) <= upper_bound.upper_bound_bytes(
                    header, options
                )


LIMITED = """
import resource, sys
from llmcli.app import main
pages = int(open("/proc/self/statm").read().split()[0])
room = pages * resource.getpagesize() + (int(sys.argv.pop(1)) << 20)
resource.setrlimit(resource.RLIMIT_AS, (room, room))
main()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux enforces RLIMIT_AS")
def test_run_respects_a_limit_of_the_address_space(stories_gguf: Path, home: Path):
    arguments = ["run", str(stories_gguf), "Once", "--raw", "-n", "4", "-t", "1", "--temp", "0"]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", LIMITED, "1024", *arguments, *more]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)

    good = run("-c", "512")
    assert good.returncode == 0, good.stderr
    refused = run("-c", "1000000")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "1,000,000 tokens of context does not fit" in refused.stderr
    assert "(ulimit -v)" in refused.stderr
    assert "--fit applies this" in refused.stderr
    fitted = run("-c", "1000000", "--fit")
    assert fitted.returncode == 0, fitted.stderr
    assert fitted.stdout == good.stdout
    assert "--fit: " in fitted.stderr


def test_limit_of_the_address_space_refuses_or_reduces_a_plan(model, monkeypatch):
    plan = make_plan(model)
    monkeypatch.setattr(host, "available_memory", lambda: 1 << 40)
    monkeypatch.setattr(
        memory_limits, "address_free_bytes", lambda: memory_limits.THREAD_BYTES + 8_000_000
    )
    with pytest.raises(UserError, match="ulimit -v"):
        admission.check_memory(plan, "", print)
    assert (admission.check_memory(plan, "on", lambda note: None).options.ctx_size or LONG) < LONG
