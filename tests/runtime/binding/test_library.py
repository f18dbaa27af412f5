"""Tests of the log of llama.cpp: each thread sees the errors of its own calls only."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmcli.errors import UserError
from llmcli.runtime.binding import library
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.library import last_log_lines, lib, reset_log
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.rows.batch import BatchRows
from tests.quant import tiny_gguf


def on_other_thread(act: Callable[[], object]) -> None:
    """Call a function on a new thread, and wait for its end."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def after(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], object]) -> None:
    """Make another thread call `act` at the end of each call of a function of llama.cpp."""
    function = getattr(lib(), name)

    def call(*arguments: Any) -> Any:
        result = function(*arguments)
        on_other_thread(act)
        return result

    monkeypatch.setattr(lib(), name, call)


def test_another_thread_does_not_hide_the_reason_of_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strange = tiny_gguf.llama(tmp_path / "m.gguf", arch="lamma")
    after(monkeypatch, "llama_model_load_from_file", reset_log)
    with pytest.raises(UserError, match="lamma"), open_model(strange):
        pass


def test_an_error_on_another_thread_does_not_fail_a_shift(
    stories_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        open_model(stories_gguf) as model,
        open_context(model, ContextOptions(256, 32, 32)) as context,
    ):
        tokens = [1, *range(300, 315)]
        context.decode(BatchRows(tokens, range(16), [0] * 16, [False] * 16))
        assert context.can_shift
        after(
            monkeypatch,
            "llama_decode",
            lambda: library._collect_error(library.LOG_ERROR, b"f: K-shift failed", None),
        )
        context.shift(0, 4, 8, tokens[-1])
        assert context.last_position(0) == 11


def test_lines_of_a_thread_are_its_own(stories_gguf: Path) -> None:
    reset_log()
    seen: list[str] = []

    def fail() -> None:
        library._collect_error(library.LOG_ERROR, b"load: no such tensor", None)
        seen.append(last_log_lines())

    on_other_thread(fail)
    assert (seen, last_log_lines()) == (["no such tensor"], "")
