"""Admission: accepted, refused and reduced plans agree with the dry run and with real runs."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from llmcli.errors import UserError
from llmcli.hardware import host, memory_limits
from llmcli.planning import admission, memory_plan, nearest_fit, upper_bound
from llmcli.planning.run_plan import RunPlan
from llmcli.runtime.binding.context import Context
from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.draft_settings import NO_DRAFTING, DraftSettings
from llmcli.runtime.requests.request import RunOptions
from quant.model_file import read_header
from tests.quant import tiny_gguf

LONG = 65536  # cells of 384 bytes in f16: the tiny model's KV is larger than all else
OPTIONS = RunOptions(LONG, 1, 1, batch_size=512, ubatch_size=64, gpu_layers="0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.llama(tmp_path_factory.mktemp("admit") / "tiny.gguf", layers=3)


@pytest.fixture(autouse=True)
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept for what grows: what fits is what is planned."""
    monkeypatch.setattr(nearest_fit, "GROWTH_BYTES", 0)


def wish(model: Path, **changes: object) -> RunPlan:
    made = RunPlan(
        "tiny", read_header.read_header(model), OPTIONS, 0, NO_DRAFTING, is_ctx_requested=True
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def need(wanted: RunPlan, part: str = "total") -> int:
    """What the dry run says is needed; `required`: what must stay in memory."""
    with nearest_fit.open_nearest_fit(wanted) as found:
        parts = [getattr(share, part) for share in found.device_memory(wanted)]
    assert None not in parts
    return sum(parts)


def told(
    wanted: RunPlan, memory: int, monkeypatch: pytest.MonkeyPatch, fit: str = ""
) -> tuple[RunPlan, list[str]]:
    monkeypatch.setattr(host, "available_memory", lambda: memory)
    words: list[str] = []
    return admission.check_memory(wanted, fit, words.append), words


def test_what_fits_begins_as_it_is(model, monkeypatch):
    wanted = wish(model)
    assert told(wanted, 1 << 40, monkeypatch) == (wanted, [])
    assert told(wanted, need(wanted), monkeypatch) == (wanted, [])
    exact = need(wanted, "required")
    with pytest.raises(UserError, match="does not fit"):
        told(wanted, exact - 1, monkeypatch)
    assert told(wanted, exact // 2, monkeypatch, "off") == (wanted, [])


def test_plenty_of_memory_is_not_rehearsed(model, monkeypatch):
    monkeypatch.setattr(nearest_fit, "open_memory_planner", None)
    wanted = wish(model)
    assert told(wanted, 1 << 40, monkeypatch)[0] == wanted


def test_the_refusal_names_the_nearest_setting_and_fit_takes_it(model, monkeypatch):
    wanted = wish(model)
    memory = need(wish(model, options=replace(OPTIONS, ctx_size=LONG // 2)))
    with pytest.raises(
        UserError, match="tiny with 65,536 tokens of context does not fit: KV cache "
    ) as caught:
        told(wanted, memory, monkeypatch)
    assert caught.value.hint == f"-c {LONG // 2} would fit; --fit applies this"
    taken, words = told(wanted, memory, monkeypatch, "on")
    assert taken == wanted.with_changes(ctx_size=LONG // 2)
    assert words == [f"--fit: {LONG // 2:,} tokens of context instead of {LONG:,}"]
    assert need(taken) <= memory < need(taken.with_changes(ctx_size=LONG // 2 + 256))


def test_smaller_types_come_before_a_context_that_is_of_no_use(model, monkeypatch):
    wanted = wish(model)
    memory = need(
        wanted.with_changes(
            ctx_size=nearest_fit.MIN_USEFUL_TOKENS, cache_type_k="q8_0", cache_type_v="q8_0"
        )
    )
    taken, words = told(wanted, memory, monkeypatch, "on")
    assert (taken.options.cache_type_k, taken.options.cache_type_v) == ("q8_0", "q8_0")
    assert taken.options.ctx_size == nearest_fit.MIN_USEFUL_TOKENS
    assert words == [
        "--fit: 2,048 tokens of context instead of 65,536, a q8_0 KV cache instead of f16"
    ]
    with pytest.raises(UserError) as caught:
        told(wanted, memory, monkeypatch)
    assert caught.value.hint.startswith("-c 2048 -ctk q8_0 -ctv q8_0 would fit")
    least = need(
        wanted.with_changes(ctx_size=256, cache_type_k="q4_0", cache_type_v="q4_0"), "required"
    )
    assert told(wanted, least, monkeypatch, "on")[0].options.cache_type_k == "q4_0"
    with pytest.raises(UserError) as caught:
        told(wanted, least - 1, monkeypatch, "on")
    assert caught.value.hint.startswith("no setting of this model fits")


def test_a_context_that_nobody_asked_for_is_shortened_without_a_word_of_fit(model, monkeypatch):
    wanted = wish(model, is_ctx_requested=False, slots=4)
    memory = need(wish(model, options=replace(OPTIONS, ctx_size=4096)))
    taken, words = told(wanted, memory, monkeypatch)
    assert (taken.options.ctx_size, taken.slots) == (4096, 1)
    assert words == ["limited by the available memory: 4,096 tokens of context instead of 65,536"]
    small = need(wish(model, options=replace(OPTIONS, ctx_size=512)))
    with pytest.raises(UserError, match="does not fit"):  # other types are not ours to choose
        told(wanted, small, monkeypatch)


def test_fewer_sequences_where_each_has_state_of_its_own(tmp_path, monkeypatch):
    recurrent = tiny_gguf.mamba(tmp_path / "m.gguf")
    options = replace(OPTIONS, ctx_size=512)
    wanted = wish(recurrent, options=options, slots=64, required_slots=64)
    memory = need(wish(recurrent, options=options, slots=16, required_slots=16))
    taken, words = told(wanted, memory, monkeypatch, "on")
    assert taken.slots == 16
    assert "16 sequences instead of 64" in words[0]
    with pytest.raises(UserError) as caught:
        told(wanted, memory, monkeypatch)
    assert "16 sequences at once would fit" in caught.value.hint


def test_branches_of_a_chat_go_first(model, monkeypatch):
    options = replace(OPTIONS, ctx_size=512)
    wanted = wish(model, options=options, slots=64, is_ctx_requested=False)
    taken, words = told(wanted, need(wanted.with_changes(slots=1)), monkeypatch)
    assert taken == wanted.with_changes(slots=1)
    assert words == [
        "limited by the available memory: one branch of the chat; other branches are computed again"
    ]


def test_a_build_that_tells_nothing_is_left_to_try(model, monkeypatch):
    """As on macOS: no account of what is allocated. A cache larger than the memory is still
    refused.
    """
    monkeypatch.setattr(Context, "memory_breakdown", lambda self: None)
    wanted = wish(model)
    cache = upper_bound.predict_cache(wanted.header, wanted.context)
    assert cache
    assert told(wanted, cache.nbytes, monkeypatch) == (wanted, [])
    with pytest.raises(UserError, match="does not fit: KV cache"):
        told(wanted, cache.nbytes - 1, monkeypatch)


def test_a_draft_model_counts(model, monkeypatch):
    alone, both = wish(model), wish(model, drafting=DraftSettings("off", model))
    assert need(both) > 1.9 * need(alone)
    with pytest.raises(UserError, match="65,536 tokens of context and a draft model does not fit"):
        told(both, need(alone), monkeypatch)
    memory = need(both) // 2
    taken, _ = told(both, memory, monkeypatch, "on")
    assert need(taken) <= memory
    assert taken.drafting == both.drafting


def test_weights_that_stay_in_the_file_are_only_slow(tmp_path, monkeypatch):
    large = tiny_gguf.llama(tmp_path / "large.gguf", hidden=512, ff=2048, layers=4)
    wanted = wish(large, options=replace(OPTIONS, ctx_size=256))
    memory = need(wanted, "required")
    assert memory < read_header.read_header(large).tensor_bytes  # floats: nothing is laid out anew
    for fit in ("", "on"):  # no setting makes them smaller
        taken, words = told(wanted, memory, monkeypatch, fit)
        assert taken == wanted
        (line,) = words
        assert "expect the speed of the disk" in line


def test_a_setting_that_is_only_slow_is_the_user_s_to_choose(model, monkeypatch):
    wanted, memory = wish(model), need(wish(model), "required")
    taken, (line,) = told(wanted, memory, monkeypatch)
    assert taken == wanted
    assert "expect the speed of the disk" in line
    taken, words = told(wanted, memory, monkeypatch, "on")
    assert LONG > (taken.options.ctx_size or 0) > LONG // 2
    assert len(words) == 1


def test_a_cache_beyond_all_measure_is_refused_by_arithmetic(model, monkeypatch):
    huge = wish(model, options=replace(OPTIONS, ctx_size=2_000_000_000))
    with pytest.raises(
        UserError, match=r"2,000,000,000 tokens of context does not fit: KV cache 2\.8 TiB"
    ) as caught:
        told(huge, 1 << 28, monkeypatch)
    assert "would fit" in caught.value.hint
    monkeypatch.setattr(host, "available_memory", lambda: None)
    assert (
        admission.check_memory(huge, "", print) == huge
    )  # a machine that tells nothing: nobody guesses


@pytest.mark.parametrize("make", [tiny_gguf.llama, tiny_gguf.gemma3, tiny_gguf.mamba])
@pytest.mark.parametrize("flash", ["auto", "off"])
def test_the_bound_is_above_the_truth(tmp_path, make, flash):
    header = read_header.read_header(make(tmp_path / "m.gguf"))
    for options in (
        ContextOptions(256, flash_attn=flash),
        ContextOptions(8192, 2048, 512, 4, flash_attn=flash),
        ContextOptions(
            4096, 64, 64, 16, type_k="f32", flash_attn=flash, unified=False, n_outputs=16
        ),
    ):
        with memory_plan.open_memory_planner(header, options, 0) as planner:
            total = planner.memory_plan().sums.total
        assert total is not None
        assert total <= upper_bound.upper_bound_bytes(header, options)


@pytest.mark.model
def test_the_bound_is_above_the_truth_for_real_models(smollm2, gemma3):
    for path in (smollm2, gemma3):
        header = read_header.read_header(path)
        for options in (
            ContextOptions(8192, n_seq_max=4),
            ContextOptions(1024, flash_attn="off", n_outputs=16),
        ):
            with memory_plan.open_memory_planner(header, options, 0) as planner:
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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux keeps to RLIMIT_AS")
def test_a_limit_on_addresses_is_kept_for_real(stories_gguf: Path, home: Path):
    words = ["run", str(stories_gguf), "Once", "--raw", "-n", "4", "-t", "1", "--temp", "0"]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", LIMITED, "1024", *words, *more]
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


def test_addresses_are_counted(model, monkeypatch):
    wanted = wish(model)
    monkeypatch.setattr(host, "available_memory", lambda: 1 << 40)
    monkeypatch.setattr(
        memory_limits, "address_free_bytes", lambda: memory_limits.THREAD_BYTES + 8_000_000
    )
    with pytest.raises(UserError, match="ulimit -v"):
        admission.check_memory(wanted, "", print)
    assert (
        admission.check_memory(wanted, "on", lambda words: None).options.ctx_size or LONG
    ) < LONG
