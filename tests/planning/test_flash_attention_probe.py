"""The choice of attention is measured once on a stub model and stored for this machine."""

import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmcli import config
from llmcli.errors import UserError
from llmcli.planning import attention_stub, flash_attention_probe
from llmcli.planning.attention_stub import HeadShape
from llmcli.planning.flash_attention_probe import AttentionCase, AttentionTimes
from llmcli.runtime import kv_size
from llmcli.runtime.binding.batch import BatchRows
from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.open_context import open_context
from quant.model_file import load_checks, read_header
from tests.fixtures.fakes import fake_header

HEADS = HeadShape(4, 2, 16)
ASKED = AttentionCase(HEADS, "f16", "f16", 1, 1, 2)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[AttentionCase]:
    """What is asked of the machine; it would always be sooner without."""
    asked: list[AttentionCase] = []

    def measure(question: AttentionCase) -> tuple[AttentionTimes, bool]:
        asked.append(question)
        return AttentionTimes(2.0, 1.0), question.threads < 3

    monkeypatch.setattr(flash_attention_probe, "measure_attention", measure)
    return asked


def test_the_stand_in_has_the_heads_and_computes(tmp_path: Path) -> None:
    path = tmp_path / "standin.gguf"
    path.write_bytes(attention_stub.build_stub_model(HEADS, 64))
    header = read_header.read_header(path)
    load_checks.check_loadable(header)
    form = kv_size.read_shape(header.metadata)
    assert form and HeadShape.from_header(header, form) == HEADS
    with (
        open_model(path, gpu_layers=0) as model,
        open_context(model, ContextOptions(64)) as context,
    ):
        (row,) = context.decode(BatchRows([1, 2], [0, 1], [0, 0], [False, True]))
        assert not row.logits.any(), "all its weights are zero"


@pytest.mark.parametrize("parallel", [1, 3])
def test_both_ways_are_timed(parallel: int) -> None:
    found, _ = flash_attention_probe.measure_attention(
        AttentionCase(HEADS, "f16", "f32", 1, 1, parallel)
    )
    assert found.flash > 0 < found.plain


def test_only_what_is_clearly_sooner_changes_anything() -> None:
    assert AttentionTimes(1.0, 0.8).is_faster_without_flash
    assert (
        not AttentionTimes(1.0, 0.9).is_faster_without_flash
        and not AttentionTimes(1.0, 2.0).is_faster_without_flash
    )


def test_it_is_measured_once_for_each_question(measured: list[AttentionCase]) -> None:
    found = config.load_config()
    other = AttentionCase(HEADS, "f16", "f16", 1, 1, 4)
    assert all(
        flash_attention_probe.is_faster_without_flash(one, found)
        for one in (ASKED, ASKED, other, ASKED)
    )
    assert measured == [ASKED, other]
    flash_attention_probe.cache_path(ASKED, found).write_text(
        json.dumps({"version": 1, "flash": 1.0, "plain": 1.0})
    )
    assert not flash_attention_probe.is_faster_without_flash(ASKED, found), (
        "as it was measured then"
    )


def test_what_a_busy_machine_tells_is_not_kept(measured: list[AttentionCase]) -> None:
    busy = AttentionCase(HEADS, "f16", "f16", 3, 3, 2)
    assert flash_attention_probe.is_faster_without_flash(
        busy, config.load_config()
    ) and flash_attention_probe.is_faster_without_flash(busy, config.load_config())
    assert measured == [busy, busy]


WRONG = ("", "[]", "{}", '{"version": 1, "flash": "x", "plain": 1}', '{"version": 2}', "[" * 9000)


@pytest.mark.parametrize("text", WRONG)
def test_what_is_damaged_is_measured_anew(text: str, measured: list[AttentionCase]) -> None:
    path = flash_attention_probe.cache_path(ASKED, config.load_config())
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert flash_attention_probe.is_faster_without_flash(ASKED, config.load_config())
    assert json.loads(path.read_text()) == {"version": 1, "flash": 2.0, "plain": 1.0}


@pytest.mark.parametrize(
    "error", [UserError("no room", hint="none"), OSError(errno.ENOSPC, "No space left on device")]
)
def test_where_it_cannot_be_measured_nothing_changes(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(question: AttentionCase) -> None:
        raise error

    monkeypatch.setattr(flash_attention_probe, "measure_attention", refused)
    assert not flash_attention_probe.is_faster_without_flash(ASKED, config.load_config())


@pytest.mark.parametrize(("size", "values"), [(15, 15), (12, 12), (16, 8)])
def test_heads_that_llama_cpp_would_not_take_are_none(size: int, values: int) -> None:
    form = kv_size.CacheShape(
        (2 * size,), (2 * values,), 0, (False,), (size,), (values,), 2 * values
    )
    assert HeadShape.from_header(fake_header(), form) is None
    assert HeadShape.from_header(
        fake_header(), replace(form, k_values=(32,), k_heads=(16,), v_heads=(16,))
    ) == HeadShape(2, 2, 16)


def test_a_folder_that_cannot_be_written_does_not_matter(measured: list[AttentionCase]) -> None:
    found = config.load_config()
    flash_attention_probe.cache_path(ASKED, found).parent.parent.mkdir(parents=True)
    flash_attention_probe.cache_path(ASKED, found).parent.write_text(
        "a file where the folder should be"
    )
    assert flash_attention_probe.is_faster_without_flash(
        ASKED, found
    ) and flash_attention_probe.is_faster_without_flash(ASKED, found)
    assert measured == [ASKED, ASKED]
