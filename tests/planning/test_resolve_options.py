"""Options that the machine decides if the user does not."""

from dataclasses import replace

import pytest

from llmcli.config import load_config
from llmcli.errors import UserError
from llmcli.hardware import host
from llmcli.planning import flash_attention_probe, resolve_options
from llmcli.planning.attention_stub import HeadShape
from llmcli.runtime.engine.schedule import Schedule
from llmcli.runtime.requests.request import RunOptions
from tests.fixtures.fakes import fake_header


def decide(monkeypatch, memory: int | None, **options):
    monkeypatch.setattr(host, "available_memory", lambda: memory)
    monkeypatch.setattr(resolve_options.devices, "free_gpu_bytes", lambda: None)
    warnings: list[str] = []
    return (
        *resolve_options.resolve_options(fake_header(), RunOptions(**options), warnings.append),
        warnings,
    )


def test_the_context_is_the_model_s_own_where_it_fits(monkeypatch):
    options, layers, warnings = decide(monkeypatch, 1 << 34)
    assert (options.ctx_size, layers, warnings) == (256, 0, [])
    assert options.threads == options.threads_batch == host.core_count()


def test_too_little_memory_shortens_it_to_what_fits(monkeypatch):
    monkeypatch.setattr(resolve_options.ModelHeader, "context_length", property(lambda _: 8192))
    # 512 bytes a cell: beside the weights (66,560 bytes) and the spare there is room for 1100 cells
    options, _, _ = decide(monkeypatch, resolve_options.RESERVED_BYTES + 66_560 + 512 * 1100)
    assert options.ctx_size == 1024


def test_a_wish_longer_than_the_training_is_granted_with_a_warning(monkeypatch):
    options, _, warnings = decide(monkeypatch, 1 << 34, ctx_size=4096)
    assert options.ctx_size == 4096
    assert "256" in warnings[0]


def test_samples_have_room_for_what_each_may_say(monkeypatch):
    monkeypatch.setattr(host, "available_memory", lambda: 1 << 34)
    monkeypatch.setattr(resolve_options.devices, "free_gpu_bytes", lambda: None)
    warnings: list[str] = []

    def size(**options) -> int | None:
        return resolve_options.resolve_options(
            fake_header(), RunOptions(**options), warnings.append, slots=4, predict=100
        )[0].ctx_size

    assert size() == 768  # 256, and three times 100
    assert size(ctx_size=1024) == 1024
    assert not warnings  # no sample is longer than the training
    monkeypatch.setattr(
        host,
        "available_memory",
        lambda: resolve_options.RESERVED_BYTES + 66_560 + 3 * 4 * 260 + 512 * 600,
    )
    assert size() == 512


@pytest.mark.parametrize(
    "wrong",
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
def test_a_senseless_wish_is_one_clear_error(monkeypatch, wrong):
    with pytest.raises(UserError) as caught:
        decide(monkeypatch, 1 << 34, **wrong)
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
def test_a_chat_holds_several_branches_where_they_share_cells(
    monkeypatch, window: int, ctx_size: int, count: int
):
    form = resolve_options.kv_size.read_shape(fake_header().metadata)
    assert form
    monkeypatch.setattr(
        resolve_options.kv_size, "read_shape", lambda metadata: replace(form, window=window)
    )
    assert resolve_options.spare_sequences(fake_header(), RunOptions(ctx_size=ctx_size)) == count
    monkeypatch.setattr(
        resolve_options.kv_size, "read_shape", lambda metadata: None
    )  # recurrent, or a cache of other rules
    assert resolve_options.spare_sequences(fake_header(), RunOptions(ctx_size=ctx_size)) == 1


def test_what_lies_outside_the_pool_leaves_half_of_what_is_free():
    assert (
        resolve_options.offload_bytes(None)
        == resolve_options.offload_bytes(1 << 40)
        == Schedule().swap_bytes
    )
    assert (
        resolve_options.offload_bytes(100 << 20) == 25 << 20
    )  # for answers that gave way, and as much for finished ones
    assert resolve_options.offload_bytes(-1) == 0


def flash(monkeypatch, memory: int | None = 1 << 34, layers: int = 0, **options) -> str:
    monkeypatch.setattr(host, "available_memory", lambda: memory)
    wanted = RunOptions(**{"ctx_size": 8192, "threads": 1, **options})
    return resolve_options.resolve_flash_attention(
        fake_header(), wanted, layers, load_config()
    ).flash_attn


def test_a_cpu_goes_without_flash_attention_where_nobody_asked_for_it(monkeypatch):
    assert flash(monkeypatch) == "off"
    assert flash(monkeypatch, flash_attn="on") == "on"
    assert (
        flash(monkeypatch, layers=-1) == flash(monkeypatch, layers=3) == "auto"
    )  # a GPU's is llama.cpp's to say
    assert (
        flash(monkeypatch, cache_type_v="q8_0") == flash(monkeypatch, cache_type_k="q8_0") == "auto"
    )


def test_where_keys_and_values_count_it_is_measured(monkeypatch):
    asked: list[flash_attention_probe.AttentionCase] = []

    def answer(question: flash_attention_probe.AttentionCase, config: object) -> bool:
        asked.append(question)
        return False

    monkeypatch.setattr(resolve_options, "is_faster_without_flash", answer)
    assert flash(monkeypatch) == "off"
    assert not asked
    monkeypatch.setattr(resolve_options, "MIN_TOKEN_BYTES", 1)
    assert flash(monkeypatch, threads=3, cache_type_k="f32") == "auto"
    assert asked == [
        flash_attention_probe.AttentionCase(HeadShape(2, 2, 32), "f32", "f16", 3, 3, 1)
    ]


def test_it_stays_where_the_scores_of_a_pass_take_too_much(monkeypatch):
    scores, cache = 4 * 2 * 512 * 8192, 512 * 8192
    room = resolve_options.RESERVED_BYTES + 66_560 + cache
    assert flash(monkeypatch, room + 2 * scores) == "off"
    assert flash(monkeypatch, room + 2 * scores - 2) == flash(monkeypatch, None) == "auto"
    assert (
        flash(monkeypatch, 1 << 40, ctx_size=resolve_options.MAX_SCORE_BYTES // (4 * 2 * 512))
        == "off"
    )
    assert (
        flash(monkeypatch, 1 << 40, ctx_size=resolve_options.MAX_SCORE_BYTES // (4 * 2 * 512) + 256)
        == "auto"
    )
