"""`llmcli worker --rpc` and the flag --rpc: one model in two processes, and errors of workers."""

import json
import os
import pty
import select
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import create_server

import numpy as np
import pytest

from llmcli.hardware import rpc_workers
from llmcli.runtime.binding.placement import rpc as binding_rpc
from quant.calibration import imatrix, moments
from tests.fixtures.cli import Done

Llmcli = Callable[..., Done]
COMMAND = (sys.executable, "-m", "llmcli.app")
# Greedy sampling without drafts on one thread, so that two runs give the same text.
DETERMINISTIC = (
    "--temp",
    "0",
    "-t",
    "1",
    "-c",
    "256",
    "--ngram-draft",
    "off",
    "--raw",
    "-p",
    "Once upon a time",
)


@pytest.fixture
def worker() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start a worker on a free port, and return its address and its process."""
    with create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    words = (*COMMAND, "worker", "--rpc", "--port", str(port), "-t", "1")
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            line = process.stdout.readline()
            assert line.startswith("CPU: "), line
            assert f"worker at 127.0.0.1:{port}" in process.stdout.readline()
            yield f"127.0.0.1:{port}", process
        finally:
            process.kill()


# Prints the planned and the measured memory of each device, with the model on a worker.
MEMORY_PROGRAM = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from llmcli.hardware.rpc_workers import add_workers
from llmcli.planning.dry_runs.memory_plan import measure_loaded, open_memory_planner
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.placement.model_placement import ModelPlacement
from quant.model_file.read_header import read_header
header = read_header(Path(sys.argv[2]))
add_workers((sys.argv[1],))
PLACEMENT = ModelPlacement(tensor_split=(1.0,))
options = ContextOptions(256, 64, 64, 1, 1, 1, "f16", "f16", "auto")
with open_memory_planner(header, options, PLACEMENT) as planner:
    planned = planner.memory_plan()
plans = (planned, measure_loaded(header, options, PLACEMENT))
print(json.dumps([[asdict(device) for device in plan.devices] for plan in plans]))
"""


def test_a_model_on_a_worker_generates_the_same_text(
    worker: tuple[str, subprocess.Popen[str]], stories_gguf: Path, llmcli: Llmcli
) -> None:
    endpoint, process = worker
    document = json.loads(llmcli("doctor", "--rpc", endpoint, "--json").out)
    assert document["workers"][0]["endpoint"] == endpoint
    assert document["workers"][0]["devices"][0]["total_bytes"] > 0
    words = ("run", str(stories_gguf), *DETERMINISTIC, "-n", "40", "--json")
    local = json.loads(llmcli(*words).out)
    done = subprocess.run(
        (*COMMAND, *words, "--rpc", endpoint), capture_output=True, text=True, timeout=120
    )
    remote = json.loads(done.stdout)
    assert remote["text"] == local["text"]
    assert remote["kv"]["allocated_bytes"] == remote["kv"]["predicted_bytes"]
    process.terminate()
    assert process.wait(30) == 0


# Runs commands one after the other. Prints for each its exit code, and for each model that it
# loaded the number of layers outside the main process.
COMMANDS_PROGRAM = """
import json, sys
from llmcli.app import main
from llmcli.bench.tune import tune
from llmcli.workflows.certification import verify
from llmcli.runtime.binding.library import lib
verify.TEST_SECONDS, tune.OBJECTIVES["chat"] = 0.1, (8, 4)
loads, load = [], lib().llama_model_load_from_file
def seen(path, params):
    loads.extend([params.n_gpu_layers] * (not params.vocab_only))
    return load(path, params)
lib().llama_model_load_from_file = seen
for words in json.loads(sys.argv.pop()):
    sys.argv[1:], loads[:] = words, []
    try:
        main()
    except SystemExit as left:
        sys.stderr.write(f"DONE {json.dumps([left.code or 0, loads])}\\n")
"""


def test_the_version_of_the_protocol_is_that_of_a_worker_of_this_build(
    worker: tuple[str, subprocess.Popen[str]],
) -> None:
    probed = rpc_workers.probe_worker(worker[0])
    assert probed.protocol == rpc_workers.protocol_version()


def test_measuring_commands_use_the_worker(
    worker: tuple[str, subprocess.Popen[str]], stories_gguf: Path, tmp_path: Path, llmcli: Llmcli
) -> None:
    endpoint, _ = worker
    model, text = str(stories_gguf), tmp_path / "text"
    text.write_text("One day a little girl named Lily found a needle in her room. " * 60)
    text_flags = ("--text", str(text), "--ctx", "64", "--chunks", "2", "-t", "1")
    rpc_flags = ("--rpc", endpoint)
    commands = [
        (
            "calibrate",
            model,
            "-o",
            str(tmp_path / "far"),
            "--moments",
            str(tmp_path / "far.moments"),
            *text_flags,
            *rpc_flags,
        ),
        ("bench", "phases", model, "-p", "8", "-n", "2", "-r", "1", "-t", "1", *rpc_flags),
        (
            "bench",
            "compare",
            model,
            "-p",
            "8",
            "-n",
            "4",
            "--seconds",
            "0.1",
            "-t",
            "1",
            *rpc_flags,
        ),
        ("bench", "tune", model, "--budget", "0.1", *rpc_flags),
        ("pareto", model, "--types", "Q8_0", "--seconds", "0", *text_flags, *rpc_flags),
        (
            "quantize",
            model,
            "--q8_0",
            "-o",
            str(tmp_path / "q8"),
            "--verify",
            "--verify-text",
            str(text),
            *rpc_flags,
        ),
    ]
    done = subprocess.run(
        (sys.executable, "-c", COMMANDS_PROGRAM, json.dumps(commands)),
        capture_output=True,
        text=True,
    )
    results = [
        json.loads(line[5:]) for line in done.stderr.splitlines() if line.startswith("DONE ")
    ]
    assert len(results) == len(commands), done.stderr
    for words, (code, layers) in zip(commands, results, strict=True):
        assert code == 0 and layers and all(layers), (words, code, layers, done.stderr)
    words = ("-o", str(tmp_path / "here"), "--moments", str(tmp_path / "here.moments"), *text_flags)
    assert llmcli("calibrate", model, *words).code == 0
    local, remote = (imatrix.load_imatrix(tmp_path / name).entries for name in ("here", "far"))
    assert list(local) == list(remote)
    for name, entry in local.items():
        np.testing.assert_allclose(
            entry.mean_squares(0, 1, entry.count),
            remote[name].mean_squares(0, 1, entry.count),
            rtol=1e-3,
        )
    local_inputs, remote_inputs = (
        moments.load_moments(tmp_path / f"{name}.moments").inputs for name in ("here", "far")
    )
    assert len(local_inputs) == len(remote_inputs)
    for local_input, remote_input in zip(local_inputs, remote_inputs, strict=True):
        assert local_input.names == remote_input.names
        assert local_input.mixed == remote_input.mixed
        sums = local_input.sums()
        np.testing.assert_allclose(sums, remote_input.sums(), rtol=1e-3, atol=1e-3 * sums.max())


def test_the_planned_memory_of_the_worker_matches_the_measured(
    worker: tuple[str, subprocess.Popen[str]], stories_gguf: Path
) -> None:
    endpoint, _ = worker
    done = subprocess.run(
        (sys.executable, "-c", MEMORY_PROGRAM, endpoint, str(stories_gguf)),
        capture_output=True,
        text=True,
    )
    planned, measured = json.loads(done.stdout)
    assert [device["device"] for device in planned] == ["CPU", "RPC0"]
    for planned_device, measured_device in zip(planned, measured, strict=True):
        for key in ("weights", "kv", "output"):
            assert planned_device[key] == measured_device[key], key
    assert planned[0]["kv"] == 0 < planned[1]["kv"]
    assert planned[1]["compute"] >= measured[1]["compute"]


def test_a_worker_lost_during_an_answer_is_one_error(
    worker: tuple[str, subprocess.Popen[str]], stories_gguf: Path
) -> None:
    endpoint, process = worker
    words = (
        "run",
        str(stories_gguf),
        *DETERMINISTIC,
        "-n",
        "-1",
        "--ignore-eos",
        "--on-full",
        "shift",
        "--rpc",
        endpoint,
    )
    with subprocess.Popen(
        (*COMMAND, *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        assert running.stdout
        assert running.stderr
        assert running.stdout.read(20)
        process.kill()
        running.stdout.read()
        err = running.stderr.read().decode()
    assert running.returncode == 1
    assert f"error: lost a worker: {endpoint}\nhint: " in err
    assert "Traceback" not in err


def test_a_worker_lost_in_a_chat_restores_the_terminal(
    worker: tuple[str, subprocess.Popen[str]], stories_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, process = worker
    monkeypatch.setenv("TERM", "xterm")
    (controller, terminal), screen = pty.openpty(), b""
    before = termios.tcgetattr(terminal)
    words = (
        "chat",
        str(stories_gguf),
        "-t",
        "1",
        "-c",
        "8192",
        "--ignore-eos",
        "--endless",
        "--rpc",
        endpoint,
    )
    try:
        with subprocess.Popen(
            (*COMMAND, *words), stdin=terminal, stdout=terminal, stderr=terminal
        ) as running:
            while b">>>" not in screen:
                screen += _read_more(controller)
            os.write(controller, b"Once\r")
            length_before = len(screen)
            while len(screen) < length_before + 600:  # the redrawn line, then the answer
                screen += _read_more(controller)
            process.kill()
            while running.poll() is None:
                if select.select([controller], [], [], 0.1)[0]:
                    screen += os.read(controller, 4096)
            while select.select([controller], [], [], 0)[0]:
                screen += os.read(controller, 4096)
        assert running.returncode == 1
        assert f"\r\nerror: lost a worker: {endpoint}\r\nhint: ".encode() in screen
        assert termios.tcgetattr(terminal) == before
    finally:
        os.close(controller)
        os.close(terminal)


def _read_more(terminal: int) -> bytes:
    """Read the next bytes from the terminal, and fail if none arrive within 60 seconds."""
    assert select.select([terminal], [], [], 60)[0], "no more output within 60 seconds"
    return os.read(terminal, 4096)


def test_invalid_uses_of_rpc_and_worker_are_errors(llmcli: Llmcli, tmp_path: Path) -> None:
    (file := tmp_path / "file").write_bytes(b"")
    for words, code, message in (
        (("worker", "--rpc", "--cache", str(file)), 1, "a file has the name of the needed folder"),
        (("worker",), 2, "kind of worker is missing"),
        (("worker", "--rpc", "--host", "0.0.0.0"), 1, "insecure"),
        (("worker", "--rpc", "--host", "there"), 1, "IPv4 address"),
        (("run", "x.gguf", "hello", "--rpc", "a:b"), 1, "invalid worker address"),
        (("run", "x.gguf", "hello", "--rpc", "127.0.0.1:1"), 1, "no worker at 127.0.0.1:1"),
        (("plan", "x.gguf", "--rpc", "127.0.0.1:1"), 1, "no worker at 127.0.0.1:1"),
        (("eval", "x.gguf", "--rpc", "127.0.0.1:1"), 1, "no worker at 127.0.0.1:1"),
        (("bench", "x.gguf", "--rpc", "127.0.0.1:1"), 1, "no worker at 127.0.0.1:1"),
        (("doctor", "--rpc", "127.0.0.1:1"), 1, "no worker at 127.0.0.1:1"),
        (("run", "x.gguf", "hello", "-ts", "1,x"), 1, "--tensor-split is '1,x'"),
        (
            ("run", "x.gguf", "hello", "-ts", "1,1,1,1,1,1,1,1,1"),
            1,
            "--tensor-split has 9 numbers for",
        ),
        (("run", "x.gguf", "hello", "--reproducible", "--rpc", "a"), 2, "--reproducible"),
        (("calibrate", "x.gguf", "-o", "y", "--rpc", "127.0.0.1:1"), 1, "no worker at 127.0.0.1:1"),
        (
            ("calibrate", "x", "-o", "y", "--merge", "--rpc", "a"),
            2,
            "--rpc cannot be combined with --merge",
        ),
        (("bench", "phases", "x.gguf", "--rpc", "127.0.0.1:1"), 1, "no worker at 127.0.0.1:1"),
        (("bench", "tune", "x.gguf", "--rpc", "127.0.0.1:1"), 1, "no worker at 127.0.0.1:1"),
        (("bench", "compare", "x.gguf", "--rpc", "127.0.0.1:1"), 1, "no worker at 127.0.0.1:1"),
        (
            ("bench", "roofline", "x.gguf", "--rpc", "a"),
            2,
            "measures this machine's processor and memory",
        ),
        (
            ("bench", "load", "http://127.0.0.1:1", "--rpc", "a"),
            2,
            "http://127.0.0.1:1 is running already",
        ),
        (
            ("bench", "load", "x.gguf", "--against", "y.gguf", "--rpc", "a"),
            2,
            "a worker serves one model at a time",
        ),
        (("pareto", "x.gguf", "--rpc", "127.0.0.1:1"), 1, "no worker at 127.0.0.1:1"),
        (
            ("quantize", "x.gguf", "--q8_0", "--verify", "--rpc", "127.0.0.1:1"),
            1,
            "no worker at 127.0.0.1:1",
        ),
        (("quantize", "x.gguf", "--q8_0", "--rpc", "a"), 2, "--rpc has no effect"),
        (
            ("quantize", "x.gguf", "--target-size", "1M", "-ts", "1"),
            2,
            "--tensor-split has no effect",
        ),
    ):
        done = llmcli(*words)
        assert done.code == code, (words, done)
        assert message in done.err, (words, done.err)


def test_a_worker_on_a_port_in_use_is_an_error(llmcli: Llmcli) -> None:
    with create_server(("127.0.0.1", 0)) as listener:
        done = llmcli("worker", "--rpc", "--port", str(listener.getsockname()[1]))
    assert done.code == 1
    assert "cannot listen on" in done.err


def test_a_build_without_rpc_is_refused_before_anything_starts(
    llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binding_rpc, "_registry", lambda: None)
    done = llmcli("worker", "--rpc", "--port", "1")
    assert (done.code, done.out) == (1, "")
    error, hint = done.err.splitlines()
    assert error == "error: this build of llama.cpp has no RPC backend"
    assert hint.startswith("hint: build llama.cpp with it: ")
