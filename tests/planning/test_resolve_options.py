"""The options of a run that llmcli chooses if the user has not set them."""

from dataclasses import replace
from typing import Any

import pytest

from llmcli.config import load_config
from llmcli.errors import UserError
from llmcli.hardware import host
from llmcli.hardware.processor import Processor
from llmcli.planning import resolve_options
from llmcli.planning.machine import DEVICE_RESERVE_BYTES, Machine, OffloadDevice
from llmcli.planning.measurements import flash_attention_probe
from llmcli.planning.measurements.attention_stub import HeadShape
from llmcli.planning.placement.placement_search import PROCESS_BYTES
from llmcli.planning.prediction.cache_layout import cache_bytes_by_layer
from llmcli.planning.prediction.memory_prediction import compute_bytes, distribute, predict_memory
from llmcli.planning.prediction.model_layout import read_layout
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.placement.model_placement import NO_DEVICES, ON_HOST, ModelPlacement
from llmcli.runtime.requests.request import RunOptions
from llmcli.units import format_size
from tests.fixtures.fakes import fake_header

PROCESSOR = Processor(4, 0, 8, None, (4,))


def machine(memory: int | None, gpu: int | None = None) -> Machine:
    """Return a machine with `memory` free bytes, and a GPU with `gpu` usable bytes."""
    reserve = DEVICE_RESERVE_BYTES
    devices = [] if gpu is None else [OffloadDevice("G", "gpu", gpu + reserve, 1 << 40, 400e9)]
    # so slow that even a tiny model is faster on the GPU
    return Machine(PROCESSOR, memory, 1e6, tuple(devices))


def resolve(
    memory: int | None, gpu: int | None = None, slots: int = 1, predict: int = 0, **options: Any
) -> tuple[RunOptions, ModelPlacement, list[str]]:
    """Return the resolved options, the placement, and the warnings and notes on a machine with
    `memory` and `gpu` bytes.
    """
    notes: list[str] = []
    resolved, placement = resolve_options.resolve_options(
        fake_header(),
        RunOptions(**options),
        notes.append,
        slots,
        predict,
        notes.append,
        machine(memory, gpu),
    )
    return resolved, placement, notes


@pytest.fixture
def trained_on_8192(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve_options.ModelHeader, "context_length", property(lambda _: 8192))


def needed_bytes(n_ctx: int, slots: int = 1) -> int:
    """Return the free bytes of a host on which a context of `n_ctx` tokens just fits."""
    layout = read_layout(fake_header())
    options = ContextOptions(n_ctx, n_seq_max=slots, n_outputs=slots)
    cache = cache_bytes_by_layer(fake_header(), options) or ()
    host = predict_memory(layout, cache, options, distribute(ON_HOST, 2, ()), 0)[0]
    return host.total + PROCESS_BYTES


def test_default_context_is_the_trained_length() -> None:
    options, placement, notes = resolve(1 << 34)
    assert (options.ctx_size, placement, notes) == (256, ON_HOST, [])
    assert options.threads_batch == 4


def test_default_context_is_shortened_to_what_fits(trained_on_8192: None) -> None:
    for n_ctx in (4096, 6144):
        options, _, notes = resolve(needed_bytes(n_ctx))
        assert options.ctx_size == n_ctx
        free = format_size(needed_bytes(n_ctx))
        assert notes == [
            f"{n_ctx:,} tokens of context instead of 8,192, because {free} are free in memory "
            "(weights 65.0 KiB); -c N overrides this"
        ]
    assert resolve(needed_bytes(4096), ctx_size=512)[2] == []
    assert resolve(1 << 34)[2] == resolve(None)[2] == []


def test_layers_that_do_not_fit_on_the_gpu_are_said(trained_on_8192: None) -> None:
    compute = compute_bytes(read_layout(fake_header()), ContextOptions(512))
    free = compute + 512 * 256 + 66_560  # one layer's cache of 512 tokens, and the output
    _, placement, notes = resolve(1 << 34, free, ctx_size=512)
    assert placement.gpu_layers == 2
    where = format_size(free + DEVICE_RESERVE_BYTES)
    assert notes == [
        f"2 of 3 layers (with the output) are on the GPU, because {where} are free there (weights 65.0 KiB); "
        "-ngl N overrides this"
    ]
    for gpu, layers in ((1 << 34, "auto"), (free, "0"), (free, "1"), (None, "auto")):
        assert resolve(1 << 34, gpu, ctx_size=512, gpu_layers=layers)[2] == []


def test_a_device_that_is_not_there_gets_no_layers() -> None:
    assert resolve(1 << 34, None, gpu_layers="all")[1] == ON_HOST
    assert resolve(1 << 34, 1 << 34, devices=NO_DEVICES)[1] == replace(ON_HOST, devices=NO_DEVICES)
    assert resolve(1 << 34, 1 << 34)[1].gpu_layers == -1
    assert resolve(1 << 34, 1 << 34, gpu_layers="1")[1].gpu_layers == 1


def test_context_longer_than_the_trained_length_gives_a_warning() -> None:
    options, _, notes = resolve(1 << 34, ctx_size=4096)
    assert options.ctx_size == 4096
    assert "256" in notes[0]


def test_each_sample_adds_the_tokens_of_its_answer_to_the_context() -> None:
    def size(memory: int = 1 << 34, **options: Any) -> int | None:
        resolved, _, notes = resolve(memory, slots=4, predict=100, **options)
        assert not [note for note in notes if "trained" in note]  # no sample is longer than that
        return resolved.ctx_size

    assert size() == 768  # 256 + 3 * 100, rounded up
    assert size(ctx_size=1024) == 1024
    assert size(needed_bytes(512, 4)) == 512


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
        {"cpu_moe": "some"},
        {"cpu_moe": "-1"},
    ],
)
def test_invalid_option_raises_an_error_with_a_hint(invalid):
    with pytest.raises(UserError) as caught:
        resolve(1 << 34, **invalid)
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
