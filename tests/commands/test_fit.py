"""chat and run ask first: a refusal with the setting that fits, and --fit takes it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from llmcli.hardware import host
from tests.commands.conftest import Done

Llmcli = Callable[..., Done]
RUN = ("--raw", "-n", "4", "-t", "1", "--temp", "0", "-ub", "64")


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside 64 MiB for what grows: room for some thousands of cells of stories260K, 640 bytes each."""
    monkeypatch.setattr(host, "available_memory", lambda: (64 << 20) + 6_000_000)


def test_a_run_that_would_not_fit_is_refused_with_what_would(llmcli: Llmcli, stories_gguf: Path, little: None) -> None:
    words = ("run", str(stories_gguf), "Once", *RUN)
    refused = llmcli(*words, "-c", "60000")
    assert (refused.code, refused.out) == (1, "")
    assert "with 60,000 tokens of context does not fit: KV cache " in refused.err
    assert "are available" in refused.err
    hint = next(line for line in refused.err.splitlines() if line.startswith("hint: "))
    size = hint.split()[2]
    assert hint.endswith("would fit, and --fit takes that")
    typed, fitted = llmcli(*words, "-c", size), llmcli(*words, "-c", "60000", "--fit")
    assert typed.code == fitted.code == 0, typed.err + fitted.err
    assert typed.out == fitted.out != ""
    assert f"--fit: {int(size):,} tokens of context instead of 60,000" in fitted.err
    assert llmcli(*words, "-c", "60000", "--fit", "off").out == typed.out


def test_chat_asks_as_well_and_model_too(llmcli: Llmcli, stories_gguf: Path, little: None) -> None:
    words = ("chat", str(stories_gguf), *RUN, "-c", "60000")
    assert "does not fit" in llmcli(*words, stdin=b"Once\n").err
    done = llmcli(*words, "-fit", stdin=f"Once\n/model {stories_gguf}\nOnce\n".encode())
    assert done.code == 0, done.err
    assert done.err.count("--fit: ") == 2


def test_what_fit_takes(llmcli: Llmcli, stories_gguf: Path) -> None:
    done = llmcli("run", str(stories_gguf), "Once", "--fit=perhaps")
    assert done.code == 1
    assert "--fit takes on or off" in done.err
