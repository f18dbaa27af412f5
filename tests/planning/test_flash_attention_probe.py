"""Which way of attention is taken: measured on a stand-in once, and kept for this machine."""

import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmcli import config
from llmcli.errors import UserError
from llmcli.planning import attention_stub, flash_attention_probe
from llmcli.planning.attention_stub import Heads
from llmcli.planning.flash_attention_probe import Question, Times
from llmcli.runtime import kv_size
from llmcli.runtime.binding.batch import BatchRows
from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.open_context import open_context
from quant.model_file import load_checks, read_header
from tests.fixtures.fakes import fake_header

HEADS = Heads(4, 2, 16)
ASKED = Question(HEADS, "f16", "f16", 1, 1, 2)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Question]:
    """What is asked of the machine; it would always be sooner without."""
    asked: list[Question] = []

    def measure(question: Question) -> tuple[Times, bool]:
        asked.append(question)
        return Times(2.0, 1.0), question.threads < 3

    monkeypatch.setattr(flash_attention_probe, "measure", measure)
    return asked


def test_the_stand_in_has_the_heads_and_computes(tmp_path: Path) -> None:
    path = tmp_path / "standin.gguf"
    path.write_bytes(attention_stub.written(HEADS, 64))
    header = read_header.read_header(path)
    load_checks.check_loadable(header)
    form = kv_size.read_shape(header.metadata)
    assert form and Heads.of(header, form) == HEADS
    with (
        open_model(path, gpu_layers=0) as model,
        open_context(model, ContextOptions(64)) as context,
    ):
        (row,) = context.decode(BatchRows([1, 2], [0, 1], [0, 0], [False, True]))
        assert not row.logits.any(), "all its weights are zero"


@pytest.mark.parametrize("parallel", [1, 3])
def test_both_ways_are_timed(parallel: int) -> None:
    found, _ = flash_attention_probe.measure(Question(HEADS, "f16", "f32", 1, 1, parallel))
    assert found.flash > 0 < found.plain


def test_only_what_is_clearly_sooner_changes_anything() -> None:
    assert Times(1.0, 0.8).sooner_without
    assert not Times(1.0, 0.9).sooner_without and not Times(1.0, 2.0).sooner_without


def test_it_is_measured_once_for_each_question(measured: list[Question]) -> None:
    found = config.load()
    other = Question(HEADS, "f16", "f16", 1, 1, 4)
    assert all(
        flash_attention_probe.sooner_without(one, found) for one in (ASKED, ASKED, other, ASKED)
    )
    assert measured == [ASKED, other]
    flash_attention_probe.place(ASKED, found).write_text(
        json.dumps({"version": 1, "flash": 1.0, "plain": 1.0})
    )
    assert not flash_attention_probe.sooner_without(ASKED, found), "as it was measured then"


def test_what_a_busy_machine_tells_is_not_kept(measured: list[Question]) -> None:
    busy = Question(HEADS, "f16", "f16", 3, 3, 2)
    assert flash_attention_probe.sooner_without(
        busy, config.load()
    ) and flash_attention_probe.sooner_without(busy, config.load())
    assert measured == [busy, busy]


WRONG = ("", "[]", "{}", '{"version": 1, "flash": "x", "plain": 1}', '{"version": 2}', "[" * 9000)


@pytest.mark.parametrize("text", WRONG)
def test_what_is_damaged_is_measured_anew(text: str, measured: list[Question]) -> None:
    path = flash_attention_probe.place(ASKED, config.load())
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert flash_attention_probe.sooner_without(ASKED, config.load())
    assert json.loads(path.read_text()) == {"version": 1, "flash": 2.0, "plain": 1.0}


@pytest.mark.parametrize(
    "error", [UserError("no room", hint="none"), OSError(errno.ENOSPC, "No space left on device")]
)
def test_where_it_cannot_be_measured_nothing_changes(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(question: Question) -> None:
        raise error

    monkeypatch.setattr(flash_attention_probe, "measure", refused)
    assert not flash_attention_probe.sooner_without(ASKED, config.load())


@pytest.mark.parametrize(("size", "values"), [(15, 15), (12, 12), (16, 8)])
def test_heads_that_llama_cpp_would_not_take_are_none(size: int, values: int) -> None:
    form = kv_size.CacheShape(
        (2 * size,), (2 * values,), 0, (False,), (size,), (values,), 2 * values
    )
    assert Heads.of(fake_header(), form) is None
    assert Heads.of(fake_header(), replace(form, k_values=(32,), k_heads=(16,), v_heads=(16,))) == Heads(
        2, 2, 16
    )


def test_a_folder_that_cannot_be_written_does_not_matter(measured: list[Question]) -> None:
    found = config.load()
    flash_attention_probe.place(ASKED, found).parent.parent.mkdir(parents=True)
    flash_attention_probe.place(ASKED, found).parent.write_text("a file where the folder should be")
    assert flash_attention_probe.sooner_without(
        ASKED, found
    ) and flash_attention_probe.sooner_without(ASKED, found)
    assert measured == [ASKED, ASKED]
