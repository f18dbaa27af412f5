"""The options of a run that llmcli chooses if the user has not set them."""

from dataclasses import replace

import pytest

from llmcli.config import load_config
from llmcli.errors import UserError
from llmcli.hardware import host
from llmcli.planning import flash_attention_probe, resolve_options
from llmcli.planning.attention_stub import HeadShape
from llmcli.runtime.binding.model_placement import ON_HOST, ModelPlacement
from llmcli.runtime.requests.request import RunOptions
from tests.fixtures.fakes import fake_header


def resolve(monkeypatch, memory: int | None, **options):
    """Return the resolved options, the placement and the warnings on a machine with `memory` bytes
    and no GPU.
    """
    monkeypatch.setattr(host, "available_memory", lambda: memory)
    monkeypatch.setattr(resolve_options.devices, "free_gpu_bytes", lambda: None)
    warnings: list[str] = []
    return (
        *resolve_options.resolve_options(fake_header(), RunOptions(**options), warnings.append),
        warnings,
    )


def test_default_context_is_the_trained_length(monkeypatch):
    options, placement, warnings = resolve(monkeypatch, 1 << 34)
    assert (options.ctx_size, placement, warnings) == (256, ON_HOST, [])
    assert options.threads == options.threads_batch == host.core_count()


def test_default_context_is_shortened_to_what_fits(monkeypatch):
    monkeypatch.setattr(resolve_options.ModelHeader, "context_length", property(lambda _: 8192))
    # the weights take 66,560 bytes, and there is memory for 1100 cells of 512 bytes
    options, _, _ = resolve(monkeypatch, resolve_options.RESERVED_BYTES + 66_560 + 512 * 1100)
    assert options.ctx_size == 1024


def resolve_with_notes(monkeypatch, *, memory: int | None, gpu: int | None, **options):
    """Return the resolved options and the notes on a machine with `memory` and `gpu` bytes free."""
    monkeypatch.setattr(host, "available_memory", lambda: memory)
    monkeypatch.setattr(resolve_options.devices, "free_gpu_bytes", lambda: gpu)
    monkeypatch.setattr(resolve_options.ModelHeader, "context_length", property(lambda _: 8192))
    notes: list[str] = []
    resolved, _ = resolve_options.resolve_options(
        fake_header(), RunOptions(**options), notes.append, note=notes.append
    )
    return resolved, notes


def test_a_lowered_default_is_said_with_the_flag_that_overrides_it(monkeypatch):
    memory = resolve_options.RESERVED_BYTES + 66_560 + 512 * 1100
    resolved, notes = resolve_with_notes(monkeypatch, memory=memory, gpu=None)
    assert resolved.ctx_size == 1024
    assert notes == [
        "1,024 tokens of context instead of 8,192, because 256.6 MiB are free in memory "
        "(weights 65.0 KiB); -c N overrides this"
    ]
    assert resolve_with_notes(monkeypatch, memory=memory, gpu=None, ctx_size=512)[1] == []
    assert resolve_with_notes(monkeypatch, memory=1 << 34, gpu=None)[1] == []
    assert resolve_with_notes(monkeypatch, memory=None, gpu=None)[1] == []


def test_layers_that_do_not_fit_on_the_gpu_are_said(monkeypatch):
    free = resolve_options.RESERVED_BYTES + 40_000
    _, notes = resolve_with_notes(monkeypatch, memory=1 << 34, gpu=free, ctx_size=512)
    assert notes == [
        "1 of 2 layers are on the GPU, because 256.0 MiB are free there (weights 65.0 KiB); "
        "-ngl N overrides this"
    ]
    for more in ({"gpu": 1 << 34}, {"gpu": free, "gpu_layers": "0"}, {"gpu": None}):
        assert resolve_with_notes(monkeypatch, memory=1 << 34, ctx_size=512, **more)[1] == []


def test_context_longer_than_the_trained_length_gives_a_warning(monkeypatch):
    options, _, warnings = resolve(monkeypatch, 1 << 34, ctx_size=4096)
    assert options.ctx_size == 4096
    assert "256" in warnings[0]


def test_each_sample_adds_the_tokens_of_its_answer_to_the_context(monkeypatch):
    monkeypatch.setattr(host, "available_memory", lambda: 1 << 34)
    monkeypatch.setattr(resolve_options.devices, "free_gpu_bytes", lambda: None)
    warnings: list[str] = []

    def size(**options) -> int | None:
        return resolve_options.resolve_options(
            fake_header(), RunOptions(**options), warnings.append, slots=4, predict=100
        )[0].ctx_size

    assert size() == 768  # 256 + 3 * 100, rounded up
    assert size(ctx_size=1024) == 1024
    assert not warnings  # no sample is longer than the trained length
    monkeypatch.setattr(
        host,
        "available_memory",
        lambda: resolve_options.RESERVED_BYTES + 66_560 + 3 * 4 * 260 + 512 * 600,
    )
    assert size() == 512


@pytest.mark.parametrize(
    "invalid",
    [
        {"ctx_size": 0},
        {"threads": -1},
        {"batch_size": 0},
        {"cache_type_k": "f17"},
        {"gpu_layers": "many"},
        {"gpu_layers": "--5"},
        {"gpu_layers": "²"},
        {"threads": 513},
    ],
)
def test_invalid_option_raises_an_error_with_a_hint(monkeypatch, invalid):
    with pytest.raises(UserError) as caught:
        resolve(monkeypatch, 1 << 34, **invalid)
    assert caught.value.hint


def test_this_machine_has_cores_and_memory():
    assert host.core_count() >= 1
    assert (host.available_memory() or 1) > 0
    assert host.cpu_name()


@pytest.mark.parametrize(
    ("window", "ctx_size", "count"),
    [
        (0, 8192, resolve_options.CHAT_SEQUENCES),
        (512, 8192, 1),
        (512, 512, resolve_options.CHAT_SEQUENCES),
        (512, 400, 4),
    ],
)
def test_chat_has_several_sequences_only_if_they_can_share_cells(
    monkeypatch, window: int, ctx_size: int, count: int
):
    cache_shape = resolve_options.kv_size.read_shape(fake_header().metadata)
    assert cache_shape
    monkeypatch.setattr(
        resolve_options.kv_size, "read_shape", lambda metadata: replace(cache_shape, window=window)
    )
    assert resolve_options.spare_sequences(fake_header(), RunOptions(ctx_size=ctx_size)) == count
    # a recurrent model, or one whose cache cannot be predicted
    monkeypatch.setattr(resolve_options.kv_size, "read_shape", lambda metadata: None)
    assert resolve_options.spare_sequences(fake_header(), RunOptions(ctx_size=ctx_size)) == 1


def flash(monkeypatch, memory: int | None = 1 << 34, layers: int = 0, **options) -> str:
    """Return the resolved value of flash_attn on a machine with `memory` bytes."""
    monkeypatch.setattr(host, "available_memory", lambda: memory)
    run_options = RunOptions(**{"ctx_size": 8192, "threads": 1, **options})
    return resolve_options.resolve_flash_attention(
        fake_header(), run_options, ModelPlacement(layers), load_config()
    ).flash_attn


def test_flash_attention_is_turned_off_on_a_cpu_unless_the_user_set_it(monkeypatch):
    assert flash(monkeypatch) == "off"
    assert flash(monkeypatch, flash_attn="on") == "on"
    # with a GPU, llama.cpp decides
    assert flash(monkeypatch, layers=-1) == flash(monkeypatch, layers=3) == "auto"
    assert (
        flash(monkeypatch, cache_type_v="q8_0") == flash(monkeypatch, cache_type_k="q8_0") == "auto"
    )


def test_attention_is_measured_only_if_a_token_has_many_bytes_in_the_cache(monkeypatch):
    measured: list[flash_attention_probe.AttentionCase] = []

    def measure(case: flash_attention_probe.AttentionCase, config: object) -> bool:
        measured.append(case)
        return False

    monkeypatch.setattr(resolve_options, "is_faster_without_flash", measure)
    assert flash(monkeypatch) == "off"
    assert not measured
    monkeypatch.setattr(resolve_options, "MIN_TOKEN_BYTES", 1)
    assert flash(monkeypatch, threads=3, cache_type_k="f32") == "auto"
    assert measured == [
        flash_attention_probe.AttentionCase(HeadShape(2, 2, 32), "f32", "f16", 3, 3, 1)
    ]


def test_flash_attention_stays_on_if_the_scores_of_a_pass_take_too_much_memory(monkeypatch):
    scores, cache = 4 * 2 * 512 * 8192, 512 * 8192
    other_bytes = resolve_options.RESERVED_BYTES + 66_560 + cache
    assert flash(monkeypatch, other_bytes + 2 * scores) == "off"
    assert flash(monkeypatch, other_bytes + 2 * scores - 2) == flash(monkeypatch, None) == "auto"
    assert (
        flash(monkeypatch, 1 << 40, ctx_size=resolve_options.MAX_SCORE_BYTES // (4 * 2 * 512))
        == "off"
    )
    assert (
        flash(monkeypatch, 1 << 40, ctx_size=resolve_options.MAX_SCORE_BYTES // (4 * 2 * 512) + 256)
        == "auto"
    )
