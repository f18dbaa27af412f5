"""The first load of a file is rehearsed in a child process. A crash there is one line here."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmcli.config import Config, load_config
from llmcli.errors import UserError
from llmcli.hardware.limited_process import ProcessOutcome
from llmcli.model_loader.rehearsal import rehearse
from llmcli.model_loader.rehearsal.rehearse import rehearse_file, rehearse_model
from llmcli.ui import UI
from quant.model_file import load_checks
from quant.model_file.read_header import read_header
from tests.fixtures.cli import Done
from tests.quant import tiny_gguf

# Architectures whose graphs abort for a file with the tensors of Llama: when the graph is built,
# and when a token is computed.
CRASHES = {
    "loads": ("llada-moe", "n_expert > 0"),
    "computes a token with": ("paddleocr", "sections"),
}


@pytest.fixture
def config(home: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.delenv("LLMCLI_TRUST")
    return load_config()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_gguf.llama(tmp_path / "m.gguf", layers=1, hidden=32, ff=32)


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[ProcessOutcome]:
    """The outcomes of the next child processes, which are not really started."""
    queue: list[ProcessOutcome] = []
    monkeypatch.setattr(rehearse, "run_limited", lambda *arguments: queue.pop(0))
    return queue


GOOD = ProcessOutcome(0, False, 'loading\ncomputing\n{"refusal": null}\n', "")


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The requests to child processes, which are not really started and find no fault."""
    sent: list[bytes] = []

    def run(command: Any, data: bytes, limits: Any, environ: Any) -> ProcessOutcome:
        sent.append(data)
        return GOOD

    monkeypatch.setattr(rehearse, "run_limited", run)
    return sent


def crash(errors: str, code: int = -signal.SIGABRT, output: str = "loading\n") -> ProcessOutcome:
    return ProcessOutcome(code, False, output, errors)


def write_crashing(folder: Path, arch: str) -> Path:
    """Write a model that passes all checks of the header, and that llama.cpp does not survive."""
    path = tiny_gguf.llama(folder / "m.gguf", layers=1, hidden=32, ff=32, heads=2, arch=arch)
    load_checks.check_loadable(read_header(path))
    return path


def rehearse_without_child(monkeypatch: pytest.MonkeyPatch, path: Path, config: Config) -> None:
    """Ask for the verdict on a file, which must be saved already."""
    monkeypatch.setattr(rehearse, "run_limited", lambda *arguments: pytest.fail("ran again"))
    rehearse_file(path, config, UI())


@pytest.mark.parametrize("action", CRASHES)
def test_a_crash_of_llama_cpp_is_one_line_with_its_cause(
    action: str,
    tmp_path: Path,
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arch, cause = CRASHES[action]
    path = write_crashing(tmp_path, arch)
    with pytest.raises(UserError) as caught:
        rehearse_file(path, config, UI())
    message = str(caught.value)
    assert message.startswith(f"llama.cpp crashes while it {action} m.gguf: ")
    assert cause in message
    assert "\n" not in message
    assert "/" not in message.split("GGML_ASSERT")[0], "no path of the machine that built it"
    assert "--trust" in caught.value.hint
    assert capsys.readouterr().err == ""
    with pytest.raises(UserError, match="crashes while it"):
        rehearse_without_child(monkeypatch, path, config)


def test_a_good_file_is_rehearsed_once_and_the_note_says_how_long_it_took(
    model: Path,
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rehearse_file(model, config, UI())
    note = capsys.readouterr().err
    assert note.startswith("m.gguf is new here: llama.cpp loaded it in a separate process first (")
    assert " s, only once; --trust skips it)\n" in note
    rehearse_without_child(monkeypatch, model, config)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("chat_template", ["{{ 1 / 0 }}", "{% broken", "{{ messages[0].content }}"])
def test_a_template_that_fails_is_no_fault_of_the_file(
    chat_template: str, tmp_path: Path, config: Config
) -> None:
    path = write_with_template(tmp_path, chat_template)
    rehearse_model(read_header(path), config, UI(), uses_template=True)


def write_with_template(folder: Path, chat_template: str) -> Path:
    from quant.gguf.layout import encode_entry
    from scripts.fuzz.gguf_architectures import read_model, write_model

    tiny = read_model(tiny_gguf.llama(folder / "plain.gguf", layers=1, hidden=32, ff=32))
    tiny.replace("tokenizer.chat_template", encode_entry("string", chat_template))
    path = folder / "m.gguf"
    write_model(tiny, path)
    return path


def test_a_file_that_llama_cpp_refuses_has_llama_cpps_own_message_and_no_verdict(
    tmp_path: Path, config: Config
) -> None:
    path = tiny_gguf.llama(tmp_path / "m.gguf", layers=2, without=("attn_q.weight",))
    for _ in range(2):
        with pytest.raises(UserError, match=r"llama.cpp cannot load m.gguf: .*attn_q.weight"):
            rehearse_file(path, config, UI())
    assert not list((config.state / "rehearsals").glob("*.json"))


def test_known_faults_are_named_without_a_child(
    tmp_path: Path, config: Config, outcomes: list[ProcessOutcome]
) -> None:
    path = tiny_gguf.llama(
        tmp_path / "m.gguf", layers=1, settings={"rope.dimension_count": 7}, hidden=32, ff=32
    )
    with pytest.raises(UserError, match=r"would crash llama.cpp: .*rotary"):
        rehearse_file(path, config, UI())


@pytest.mark.parametrize("way", ["environment", "configuration"])
def test_a_trusted_file_is_not_rehearsed(
    way: str,
    tmp_path: Path,
    config: Config,
    outcomes: list[ProcessOutcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write_crashing(tmp_path, "llada-moe")
    if way == "environment":
        monkeypatch.setenv("LLMCLI_TRUST", "yes")
        config = load_config()
    else:
        config = replace(config, trust_files=True)
    rehearse_file(path, config, UI())


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (
            crash("warning: x\n/b/c/llama-graph.cpp:70: GGML_ASSERT(a > 0) failed\n"),
            "llama.cpp crashes while it loads m.gguf: llama-graph.cpp:70: GGML_ASSERT(a > 0) failed",
        ),
        (
            crash(
                "terminate called after throwing an instance of 'std::out_of_range'\n  what():  map::at\n"
            ),
            "llama.cpp crashes while it loads m.gguf: map::at",
        ),
        (
            crash("", -signal.SIGSEGV, "loading\ncomputing\n"),
            "llama.cpp crashes while it computes a token with m.gguf: SIGSEGV",
        ),
        (crash("", -signal.SIGFPE), "llama.cpp crashes while it loads m.gguf: SIGFPE"),
        (crash("", 3, ""), "llama.cpp crashes while it loads m.gguf: exit code 3"),
        (crash("", 0, "loading\n"), "llama.cpp crashes while it loads m.gguf: exit code 0"),
        (
            crash("x" * 999),
            f"llama.cpp crashes while it loads m.gguf: {'x' * rehearse.MAX_CAUSE_CHARACTERS}",
        ),
        (
            crash("", -signal.SIGXCPU),
            "the time limit ended llama.cpp while it loads m.gguf",
        ),
        (
            ProcessOutcome(-signal.SIGKILL, True, "loading\ncomputing\n", ""),
            "the time limit ended llama.cpp while it computes a token with m.gguf",
        ),
        (
            crash("terminate called\n  what():  std::bad_alloc\n"),
            "llama.cpp takes more than 1.5 GiB, besides the weights, while it loads m.gguf",
        ),
        (
            crash(
                "", 0, 'loading\n{"refusal": ["llama.cpp cannot load m.gguf: std::bad_alloc", ""]}'
            ),
            "llama.cpp takes more than 1.5 GiB, besides the weights, while it loads m.gguf",
        ),
        (
            crash("", -signal.SIGKILL),
            "llama.cpp takes more than 1.5 GiB, besides the weights, while it loads m.gguf",
        ),
        (
            crash("ggml-alloc.c:78: not enough space in the buffer"),
            "llama.cpp crashes while it loads m.gguf: ggml-alloc.c:78: not enough space in the buffer",
        ),
    ],
)
def test_every_end_of_the_child_has_one_line(
    outcome: ProcessOutcome,
    message: str,
    model: Path,
    config: Config,
    outcomes: list[ProcessOutcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rehearse.host, "available_memory", lambda: 1 << 40)
    outcomes.append(outcome)
    with pytest.raises(UserError) as caught:
        rehearse_file(model, config, UI())
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "outcome",
    [
        ProcessOutcome(-signal.SIGKILL, True, "loading\n", ""),
        ProcessOutcome(-signal.SIGKILL, False, "loading\n", ""),
    ],
)
def test_a_fault_that_may_be_due_to_a_busy_machine_is_not_saved(
    outcome: ProcessOutcome, model: Path, config: Config, outcomes: list[ProcessOutcome]
) -> None:
    outcomes += [outcome, GOOD]
    with pytest.raises(UserError):
        rehearse_file(model, config, UI())
    rehearse_file(model, config, UI())


def test_lack_of_memory_is_not_saved_on_a_machine_with_little_free_memory(
    model: Path,
    config: Config,
    outcomes: list[ProcessOutcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rehearse.host, "available_memory", lambda: 1 << 30)
    outcomes += [crash("std::bad_alloc"), GOOD]
    with pytest.raises(UserError, match="takes more than 819"):
        rehearse_file(model, config, UI())
    rehearse_file(model, config, UI())


def test_a_dry_run_is_followed_by_a_rehearsal_with_weights(
    model: Path, config: Config, requests: list[bytes]
) -> None:
    for computes in (False, False, True, True, False):
        rehearse_file(model, config, UI(), computes=computes)
    assert [b'"computes": true' in request for request in requests] == [False, True]


def test_weights_that_do_not_fit_into_memory_are_not_read(
    model: Path, config: Config, requests: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearse.host, "available_memory", lambda: 1000)
    for _ in range(2):
        rehearse_file(model, config, UI())
    assert [b'"computes": false' in request for request in requests] == [True]


@pytest.mark.parametrize("uses_template", [True, False])
def test_a_fault_of_the_chat_template_matters_only_if_it_is_used(
    uses_template: bool, model: Path, config: Config, outcomes: list[ProcessOutcome]
) -> None:
    outcomes.append(crash("", -signal.SIGXCPU, "loading\ncomputing\nformatting\n"))
    header = read_header(model)
    if uses_template:
        with pytest.raises(
            UserError, match=r"while the chat template of m.gguf is rendered"
        ) as caught:
            rehearse_model(header, config, UI(), uses_template=True)
        assert "--raw" in caught.value.hint
    else:
        rehearse_model(header, config, UI())


def test_without_a_writable_folder_a_warning_says_that_the_verdict_is_lost(
    model: Path,
    config: Config,
    outcomes: list[ProcessOutcome],
    capsys: pytest.CaptureFixture[str],
) -> None:
    config.state.parent.mkdir(parents=True, exist_ok=True)
    config.state.write_text("a file in the place of the folder")
    outcomes += [GOOD, GOOD]
    for _ in range(2):
        rehearse_file(model, config, UI())
        assert "warning: the next start loads m.gguf in a separate process again: cannot write" in (
            capsys.readouterr().err
        )


def test_a_folder_named_like_the_package_is_not_imported(
    tmp_path: Path, model: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("llmcli", "json"):
        (tmp_path / "here" / name).mkdir(parents=True)
        (tmp_path / "here" / name / "__init__.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path / "here")
    rehearse_file(Path(os.path.relpath(model)), config, UI())


COMMANDS = {
    "run": ("run", "FILE", "hi"),
    "run --raw": ("run", "FILE", "hi", "--raw"),
    "run -md": ("run", "GOOD", "hi", "-md", "FILE"),
    "chat": ("chat", "FILE"),
    "serve": ("serve", "FILE", "--port", "0"),
    "batch": ("batch", "FILE", "LINES", "-o", "OUT"),
    "embed": ("embed", "FILE", "LINES", "-o", "OUT"),
    "rerank": ("rerank", "FILE", "LINES", "-o", "OUT"),
    "bench": ("bench", "FILE", "-p", "4", "-n", "2", "-r", "1"),
    "bench phases": ("bench", "phases", "FILE"),
    "bench roofline": ("bench", "roofline", "FILE", "-t", "1"),
    "bench spec": ("bench", "spec", "FILE"),
    "bench spec -md": ("bench", "spec", "GOOD", "-md", "FILE"),
    "bench tune": ("bench", "tune", "FILE"),
    "bench compare": ("bench", "compare", "GOOD", "FILE"),
    "eval": ("eval", "FILE"),
    "eval --base": ("eval", "GOOD", "--base", "FILE"),
    "calibrate": ("calibrate", "FILE", "-o", "OUT"),
    "plan": ("plan", "FILE"),
    "plan --measure": ("plan", "FILE", "--measure"),
    "plan -md": ("plan", "GOOD", "-md", "FILE"),
    "show --template": ("show", "FILE", "--template"),
    "quantize --method": ("quantize", "FILE", "--type", "Q4_0", "--method", "gptq", "-o", "OUT"),
    "quantize --target-size": ("quantize", "FILE", "--target-size", "50K", "-o", "OUT"),
    "quantize --verify": ("quantize", "FILE", "--type", "Q4_0", "--verify", "-o", "OUT"),
    "pareto": ("pareto", "FILE"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_that_loads_a_model_rehearses_it(
    name: str,
    tmp_path: Path,
    config: Config,
    llmcli: Callable[..., Done],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tiny_gguf.llama(tmp_path / "bad.gguf", layers=1, hidden=32, ff=32)
    good = tiny_gguf.llama(tmp_path / "good.gguf", layers=2, hidden=32, ff=32)
    (tmp_path / "lines.jsonl").write_text('{"prompt": "hi"}\n')

    def run(command: Any, data: bytes, limits: Any, environ: Any) -> ProcessOutcome:
        return crash("x.cpp:1: GGML_ASSERT(y) failed\n") if b"bad.gguf" in data else GOOD

    monkeypatch.setattr(rehearse, "run_limited", run)
    monkeypatch.setattr("llmcli.bench.roofline.measure_machine", lambda *arguments: None)
    words = {
        "FILE": str(file),
        "GOOD": str(good),
        "OUT": str(tmp_path / "out"),
        "LINES": str(tmp_path / "lines.jsonl"),
    }
    done = llmcli(*(words.get(word, word) for word in COMMANDS[name]), stdin=b"hi\n")
    errors = [line for line in done.err.splitlines() if line.startswith(("error: ", "hint: "))]
    assert (done.code, errors) == (
        1,
        [
            "error: llama.cpp crashes while it loads bad.gguf: x.cpp:1: GGML_ASSERT(y) failed",
            f"hint: {rehearse.TRUST_HINT}",
        ],
    ), done.err
    help_text = llmcli(*[word for word in COMMANDS[name][:2] if word.islower()], "--help").out
    assert "--trust" in help_text


def test_trust_runs_a_file_without_rehearsing_it(
    stories_gguf: Path,
    config: Config,
    llmcli: Callable[..., Done],
    outcomes: list[ProcessOutcome],
) -> None:
    done = llmcli("run", str(stories_gguf), "hi", "-n", "1", "-t", "1", "--trust")
    assert done.code == 0
    assert "new here" not in done.err
