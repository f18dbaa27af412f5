"""`run` and `chat` refuse a model that does not fit in memory and name options that do; --fit
applies those options.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from llmcli.hardware import host
from llmcli.planning.dry_runs import nearest_fit
from llmcli.planning.dry_runs.memory_plan import open_memory_planner
from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.placement.model_placement import ON_HOST
from quant.model_file import read_header
from tests.fixtures.cli import Done
from tests.quant import tiny_gguf

Llmcli = Callable[..., Done]
RUN = ("--raw", "-n", "4", "-t", "1", "--temp", "0", "-ub", "64")


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 6 MB be available beyond the 64 MiB that is reserved for growth.

    That holds the KV cache of a few thousand tokens of stories260K, at 640 bytes each.
    """
    monkeypatch.setattr(host, "available_memory", lambda: (64 << 20) + 6_000_000)


def test_a_run_that_does_not_fit_names_a_context_size_that_does(
    llmcli: Llmcli, stories_gguf: Path, little_memory: None
) -> None:
    words = ("run", str(stories_gguf), "Once", *RUN)
    refused = llmcli(*words, "-c", "60000")
    assert (refused.code, refused.out) == (1, "")
    assert "with 60,000 tokens of context does not fit: KV cache " in refused.err
    assert "are available" in refused.err
    hint = next(line for line in refused.err.splitlines() if line.startswith("hint: "))
    size = hint.split()[2]
    assert hint.endswith("would fit (the model was trained on 512 tokens); --fit applies this")
    typed, fitted = llmcli(*words, "-c", size), llmcli(*words, "-c", "60000", "--fit")
    assert typed.code == fitted.code == 0, typed.err + fitted.err
    assert typed.out == fitted.out != ""
    assert f"--fit: {int(size):,} tokens of context instead of 60,000" in fitted.err
    assert llmcli(*words, "-c", "60000", "--fit", "off").out == typed.out


def test_chat_and_its_model_command_check_the_fit(
    llmcli: Llmcli, stories_gguf: Path, little_memory: None
) -> None:
    words = ("chat", str(stories_gguf), *RUN, "-c", "60000")
    assert "does not fit" in llmcli(*words, stdin=b"Once\n").err
    done = llmcli(*words, "-fit", stdin=f"Once\n/model {stories_gguf}\nOnce\n".encode())
    assert done.code == 0, done.err
    assert done.err.count("--fit: ") == 2


def test_an_invalid_value_of_fit_is_an_error(llmcli: Llmcli, stories_gguf: Path) -> None:
    done = llmcli("run", str(stories_gguf), "Once", "--fit=perhaps")
    assert done.code == 1
    assert "--fit takes on or off" in done.err


def test_fit_reduces_the_number_of_samples(
    llmcli: Llmcli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is recurrent, so every sample needs its own state."""
    model = tiny_gguf.mamba(tmp_path / "mamba.gguf")
    words = ("run", str(model), "ab", *RUN, "-c", "512", "--samples", "64", "-n", "2", "--json")
    with open_memory_planner(
        read_header.read_header(model), ContextOptions(512, 2048, 64, 20), ON_HOST
    ) as planner:
        available = planner.memory_plan().sums.total
    monkeypatch.setattr(nearest_fit, "GROWTH_BYTES", 0)
    monkeypatch.setattr(host, "available_memory", lambda: available)
    refused = llmcli(*words)
    assert refused.code == 1, refused.err
    assert "sequences at once would fit; --fit applies this" in refused.err
    done = llmcli(*words, "--fit")
    assert done.code == 0, done.err
    count = len(json.loads(done.out)["samples"])
    assert count == 16
    assert f"--fit: {count} sequences instead of 64" in done.err


def test_the_model_is_loaded_when_the_memory_figures_are_unknown(
    llmcli: Llmcli, stories_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("available_memory", "resident_memory", "total_memory", "last_cache_bytes"):
        monkeypatch.setattr(host, name, lambda: None)
    monkeypatch.setattr(Context, "memory_breakdown", lambda self: None)
    done = llmcli("run", str(stories_gguf), "Once", *RUN, "-c", "512")
    assert (done.code, bool(done.out)) == (0, True), done.err
    done = llmcli("plan", str(stories_gguf), "-c", "512")
    assert done.code == 0, done.err
    assert "unknown memory is available: whether it fits is unknown" in done.out
    assert "sequences of 512 tokens that fit at once: unknown" in done.out


@pytest.mark.parametrize("command", ["run", "plan"])
def test_unsupported_options_are_an_error_before_loading(
    llmcli: Llmcli, stories_gguf: Path, command: str
) -> None:
    prompt_flags = ("Once", *RUN) if command == "run" else ()
    for words, message in (
        (("-ctk", "q8_0"), "heads have 8"),
        (("-ctk", "q9"), "unknown KV cache type"),
        (("-ctv", "q4_0", "-fa", "off"), "needs flash attention"),
        (("-c", "-3"), "--ctx-size is -3"),
    ):
        done = llmcli(command, str(stories_gguf), *prompt_flags, *words)
        assert (done.code, done.out) == (1, ""), words
        assert message in done.err
        assert "hint: " in done.err
    done = llmcli(command, str(stories_gguf), *prompt_flags, "-c", "4096")
    assert done.code == 0, done.err
    assert "the 512 tokens this model was trained on" in done.err
