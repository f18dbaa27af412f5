"""The measurement of attention with and without flash attention on a stub model, and its saved
results.
"""

import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmcli import config
from llmcli.errors import UserError
from llmcli.planning.measurements import attention_stub, flash_attention_probe
from llmcli.planning.measurements.attention_stub import HeadShape
from llmcli.planning.measurements.flash_attention_probe import AttentionCase, AttentionTimes
from llmcli.runtime import kv_size
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.placement.model_placement import ON_HOST
from llmcli.runtime.binding.rows.batch import BatchRows
from quant.model_file import load_checks, read_header
from tests.fixtures.fakes import fake_header

HEADS = HeadShape(4, 2, 16)
CASE = AttentionCase(HEADS, "f16", "f16", 1, 1, 2)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[AttentionCase]:
    """Replace the measurement by one that is always faster without flash attention, and return the
    list of measured cases. With three threads the machine counts as busy.
    """
    cases: list[AttentionCase] = []

    def measure(case: AttentionCase) -> tuple[AttentionTimes, bool]:
        cases.append(case)
        return AttentionTimes(2.0, 1.0), case.threads < 3

    monkeypatch.setattr(flash_attention_probe, "measure_attention", measure)
    return cases


def test_stub_model_has_the_given_heads_and_runs(tmp_path: Path) -> None:
    path = tmp_path / "stub.gguf"
    path.write_bytes(attention_stub.build_stub_model(HEADS, 64))
    header = read_header.read_header(path)
    load_checks.check_loadable(header)
    cache_shape = kv_size.read_shape(header.metadata)
    assert cache_shape and HeadShape.from_header(header, cache_shape) == HEADS
    with (
        open_model(path, ON_HOST) as model,
        open_context(model, ContextOptions(64)) as context,
    ):
        (row,) = context.decode(BatchRows([1, 2], [0, 1], [0, 0], [False, True]))
        assert not row.logits.any(), "all its weights are zero"


@pytest.mark.parametrize("parallel", [1, 3])
def test_attention_is_timed_with_and_without_flash_attention(parallel: int) -> None:
    times, _ = flash_attention_probe.measure_attention(
        AttentionCase(HEADS, "f16", "f32", 1, 1, parallel)
    )
    assert times.flash > 0 < times.plain


def test_flash_attention_is_turned_off_only_for_a_clear_gain() -> None:
    assert AttentionTimes(1.0, 0.8).is_faster_without_flash
    assert (
        not AttentionTimes(1.0, 0.9).is_faster_without_flash
        and not AttentionTimes(1.0, 2.0).is_faster_without_flash
    )


def test_each_case_is_measured_once_and_then_read_from_its_file(
    measured: list[AttentionCase],
) -> None:
    settings = config.load_config()
    other_case = AttentionCase(HEADS, "f16", "f16", 1, 1, 4)
    assert all(
        flash_attention_probe.is_faster_without_flash(case, settings)
        for case in (CASE, CASE, other_case, CASE)
    )
    assert measured == [CASE, other_case]
    flash_attention_probe.cache_path(CASE, settings).write_text(
        json.dumps({"version": 1, "flash": 1.0, "plain": 1.0})
    )
    assert not flash_attention_probe.is_faster_without_flash(CASE, settings), "the saved result"


def test_result_of_a_busy_machine_is_not_saved(measured: list[AttentionCase]) -> None:
    busy = AttentionCase(HEADS, "f16", "f16", 3, 3, 2)
    assert flash_attention_probe.is_faster_without_flash(
        busy, config.load_config()
    ) and flash_attention_probe.is_faster_without_flash(busy, config.load_config())
    assert measured == [busy, busy]


WRONG = ("", "[]", "{}", '{"version": 1, "flash": "x", "plain": 1}', '{"version": 2}', "[" * 9000)


@pytest.mark.parametrize("text", WRONG)
def test_damaged_result_is_measured_again(text: str, measured: list[AttentionCase]) -> None:
    path = flash_attention_probe.cache_path(CASE, config.load_config())
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert flash_attention_probe.is_faster_without_flash(CASE, config.load_config())
    assert json.loads(path.read_text()) == {"version": 1, "flash": 2.0, "plain": 1.0}


@pytest.mark.parametrize(
    "error", [UserError("no room", hint="none"), OSError(errno.ENOSPC, "No space left on device")]
)
def test_flash_attention_stays_on_if_the_measurement_fails(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(case: AttentionCase) -> None:
        raise error

    monkeypatch.setattr(flash_attention_probe, "measure_attention", fail)
    assert not flash_attention_probe.is_faster_without_flash(CASE, config.load_config())


@pytest.mark.parametrize(("size", "values"), [(15, 15), (12, 12), (16, 8)])
def test_no_heads_for_a_model_that_the_stub_cannot_imitate(size: int, values: int) -> None:
    cache_shape = kv_size.CacheShape(
        (2 * size,), (2 * values,), 0, (False,), (size,), (values,), 2 * values
    )
    assert HeadShape.from_header(fake_header(), cache_shape) is None
    without_kv_heads = replace(cache_shape, k_values=(0,), k_heads=(16,), v_heads=(16,))
    assert HeadShape.from_header(fake_header(), without_kv_heads) is None
    assert HeadShape.from_header(
        fake_header(), replace(cache_shape, k_values=(32,), k_heads=(16,), v_heads=(16,))
    ) == HeadShape(2, 2, 16)


def test_result_that_cannot_be_saved_is_measured_every_time(
    measured: list[AttentionCase],
) -> None:
    settings = config.load_config()
    folder = flash_attention_probe.cache_path(CASE, settings).parent
    folder.parent.mkdir(parents=True)
    folder.write_text("a file with the name of the folder")
    assert flash_attention_probe.is_faster_without_flash(CASE, settings)
    assert flash_attention_probe.is_faster_without_flash(CASE, settings)
    assert measured == [CASE, CASE]
