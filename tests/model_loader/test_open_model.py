"""Replacing the model of a chat with /model: the order of opening and closing, and real models."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from llmcli.config import load_config
from llmcli.errors import UserError
from llmcli.model_loader.earlier_load import EarlierLoad
from llmcli.model_loader.open_model import ModelSwitcher
from llmcli.model_loader.planned_memory import PlannedMemory
from llmcli.model_loader.run_flags import RunFlags
from llmcli.runtime.requests.beam_settings import BeamSettings
from llmcli.runtime.requests.request import RunOptions
from llmcli.ui import UI
from tests.fixtures.cli import Done

Llmcli = Callable[..., Done]
Fake = Callable[..., list[Any]]


def test_new_model_is_opened_before_the_old_one_is_closed(
    llmcli: Llmcli, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = fake(b"yes")
    events: list[str] = []
    from llmcli.model_loader import open_model

    open_runner = open_model.open_runner

    class RecordedRunner:
        """A context manager that opens the fake model and records when it is opened and closed.
        Opening the third model fails.
        """

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.inner, self.number = open_runner(*args, **kwargs), len(opened) + 1

        def __enter__(self) -> Any:
            if self.number == 3:
                raise UserError("llama.cpp cannot load it", hint="no")
            events.append(f"open {self.number}")
            return self.inner.__enter__()

        def __exit__(self, *error: Any) -> None:
            events.append(f"close {self.number}")

    monkeypatch.setattr(open_model, "open_runner", RecordedRunner)
    done = llmcli(
        "chat", "fake", "--temp", "0", stdin=b"one\n/model fake\ntwo\n/model fake\nthree\n"
    )
    assert events == ["open 1", "open 2", "close 1", "close 2"]
    assert done.out == "yes\nfake \u00b7 F32 \u00b7 256 tokens of context\nyes\nyes\n"
    assert "llama.cpp cannot load it" in done.err
    assert done.code == 1


def test_real_model_replaces_another_in_a_chat(stories_gguf: Path, home: Path) -> None:
    lines = (
        f"Once upon a time\n/model {stories_gguf}\n and then\n"
        "/model ./nothing.gguf\n the end\n/kv\n"
    )
    flags = ["--raw", "-n", "4", "-c", "256", "-t", "1"]
    command = [sys.executable, "-m", "llmcli.app", "chat", str(stories_gguf), *flags]
    done = subprocess.run(
        command, input=lines, capture_output=True, text=True, timeout=240, check=False
    )
    assert "Traceback" not in done.stderr
    assert done.stderr.count("(+0 reused)") == 2  # the first answer of each model reuses no cells
    assert "error: no such file or folder: ./nothing.gguf" in done.stderr
    assert "difference       0" in done.stdout
    assert done.returncode == 1


@pytest.mark.parametrize(
    "broken", ["{% for m in messages %}", "{% for i in [1] %}" * 150 + "{% endfor %}" * 150]
)
def test_broken_template_is_an_error_before_a_model_is_opened(
    llmcli: Llmcli, fake: Fake, broken: str
) -> None:
    opened = fake(b"yes")
    done = llmcli("serve", "fake", "--port", "0", "--chat-template", broken)
    assert (done.code, done.out, opened) == (1, "", [])
    assert "the chat template is broken" in done.err


def test_a_planned_model_gets_the_context_of_its_plan(stories_gguf: Path) -> None:
    flags = RunFlags(RunOptions(threads=1), {}, BeamSettings(), trust=True)
    sizes = []
    for earlier in (None, EarlierLoad(PlannedMemory(512, 1, 1, 1, 1, 1))):
        models = ModelSwitcher(
            flags, load_config(), UI(color=False), True, parallel=2, earlier=earlier
        )
        with closing(models):
            runner = models.open(str(stories_gguf)).runner
            sizes.append((models.predict_memory(str(stories_gguf)).n_ctx, runner.n_ctx))
    assert sizes == [(1024, 1024), (512, 512)]
