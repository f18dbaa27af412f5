"""chat and run refuse a plan that does not fit and name one that does; --fit uses it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from llmcli.hardware import host
from llmcli.planning import nearest_fit
from llmcli.planning.memory_plan import open_memory_planner
from llmcli.runtime.binding.context import Context
from llmcli.runtime.binding.context_options import ContextOptions
from quant.model_file import read_header
from tests.fixtures.cli import Done
from tests.quant import tiny_gguf

Llmcli = Callable[..., Done]
RUN = ("--raw", "-n", "4", "-t", "1", "--temp", "0", "-ub", "64")


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside 64 MiB for what grows: room for some thousands of cells of stories260K, 640 bytes
    each.
    """
    monkeypatch.setattr(host, "available_memory", lambda: (64 << 20) + 6_000_000)


def test_a_run_that_would_not_fit_is_refused_with_what_would(
    llmcli: Llmcli, stories_gguf: Path, little: None
) -> None:
    words = ("run", str(stories_gguf), "Once", *RUN)
    refused = llmcli(*words, "-c", "60000")
    assert (refused.code, refused.out) == (1, "")
    assert "with 60,000 tokens of context does not fit: KV cache " in refused.err
    assert "are available" in refused.err
    hint = next(line for line in refused.err.splitlines() if line.startswith("hint: "))
    size = hint.split()[2]
    assert hint.endswith("would fit; --fit applies this")
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


def test_samples_that_do_not_fit_become_fewer(
    llmcli: Llmcli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recurrent model keeps state for each."""
    model = tiny_gguf.mamba(tmp_path / "mamba.gguf")
    words = ("run", str(model), "ab", *RUN, "-c", "512", "--samples", "64", "-n", "2", "--json")
    with open_memory_planner(
        read_header.read_header(model), ContextOptions(512, 2048, 64, 20), 0
    ) as planned:
        room = planned.memory_plan().sums.total
    monkeypatch.setattr(nearest_fit, "GROWTH_BYTES", 0)
    monkeypatch.setattr(host, "available_memory", lambda: room)
    refused = llmcli(*words)
    assert refused.code == 1, refused.err
    assert "sequences at once would fit; --fit applies this" in refused.err
    done = llmcli(*words, "--fit")
    assert done.code == 0, done.err
    count = len(json.loads(done.out)["samples"])
    assert count == 16
    assert f"--fit: {count} sequences instead of 64" in done.err


def test_a_machine_that_tells_nothing_is_left_to_try(
    llmcli: Llmcli, stories_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("available_memory", "resident_memory", "total_memory", "last_cache_bytes"):
        monkeypatch.setattr(host, name, lambda: None)
    monkeypatch.setattr(Context, "memory_breakdown", lambda self: None)
    done = llmcli("run", str(stories_gguf), "Once", *RUN, "-c", "512")
    assert (done.code, bool(done.out)) == (0, True), done.err
    told = llmcli("plan", str(stories_gguf), "-c", "512")
    assert told.code == 0, told.err
    assert "unknown memory is available: whether it fits is unknown" in told.out
    assert "sequences of 512 tokens that fit at once: unknown" in told.out


@pytest.mark.parametrize("command", ["run", "plan"])
def test_what_the_model_or_the_build_does_not_take_is_said_before_loading(
    llmcli: Llmcli, stories_gguf: Path, command: str
) -> None:
    more = ("Once", *RUN) if command == "run" else ()
    for words, why in (
        (("-ctk", "q8_0"), "heads have 8"),
        (("-ctk", "q9"), "unknown KV cache type"),
        (("-ctv", "q4_0", "-fa", "off"), "needs flash attention"),
        (("-c", "-3"), "--ctx-size is -3"),
    ):
        done = llmcli(command, str(stories_gguf), *more, *words)
        assert (done.code, done.out) == (1, ""), words
        assert why in done.err
        assert "hint: " in done.err
    done = llmcli(command, str(stories_gguf), *more, "-c", "4096")
    assert done.code == 0, done.err
    assert "the 512 tokens this model was trained on" in done.err
