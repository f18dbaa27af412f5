"""`llmcli worker --rpc` and `--rpc`: one model in two processes, and errors of unusable workers."""

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

from quant.calibration import imatrix, moments
from tests.fixtures.cli import Done

Llmcli = Callable[..., Done]
COMMAND = (sys.executable, "-m", "llmcli.app")
# What the model says is decided beforehand: greedy, no guesses, one thread.
PLAIN = (
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
    """A worker on a port of its own, and its process."""
    with create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    words = (*COMMAND, "worker", "--rpc", "--port", str(port), "-t", "1")
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            said = process.stdout.readline()
            assert said.startswith("CPU: "), said
            assert f"worker at 127.0.0.1:{port}" in process.stdout.readline()
            yield f"127.0.0.1:{port}", process
        finally:
            process.kill()


SHARES = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from llmcli.hardware.rpc_workers import add_workers
from llmcli.planning.memory_plan import measure_loaded, open_memory_planner
from llmcli.runtime.binding.context_options import ContextOptions
from quant.model_file.read_header import read_header
header = read_header(Path(sys.argv[2]))
add_workers((sys.argv[1],), (1.0,))
options = ContextOptions(256, 64, 64, 1, 1, 1, "f16", "f16", "auto")
with open_memory_planner(header, options, -1) as planner:
    planned = planner.memory_plan()
plans = (planned, measure_loaded(header, options, -1))
print(json.dumps([[asdict(device) for device in plan.devices] for plan in plans]))
"""


def test_a_model_on_a_worker_says_what_it_says_here(
    worker: tuple[str, subprocess.Popen[str]], stories_gguf: Path, llmcli: Llmcli
) -> None:
    endpoint, process = worker
    told = json.loads(llmcli("doctor", "--rpc", endpoint, "--json").out)
    assert told["workers"][0]["endpoint"] == endpoint
    assert told["workers"][0]["devices"][0]["total_bytes"] > 0
    words = ("run", str(stories_gguf), *PLAIN, "-n", "40", "--json")
    here = json.loads(llmcli(*words).out)
    done = subprocess.run(
        (*COMMAND, *words, "--rpc", endpoint), capture_output=True, text=True, timeout=120
    )
    there = json.loads(done.stdout)
    assert there["text"] == here["text"]
    assert there["kv"]["allocated_bytes"] == there["kv"]["predicted_bytes"]
    process.terminate()
    assert process.wait(30) == 0


# Runs commands one after the other, and says of each what it ended with and with how many layers
# elsewhere it loaded.
COMMANDS = """
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


def test_what_measures_a_model_measures_it_on_a_worker(
    worker: tuple[str, subprocess.Popen[str]], stories_gguf: Path, tmp_path: Path, llmcli: Llmcli
) -> None:
    endpoint, _ = worker
    model, text = str(stories_gguf), tmp_path / "text"
    text.write_text("One day a little girl named Lily found a needle in her room. " * 60)
    read = ("--text", str(text), "--ctx", "64", "--chunks", "2", "-t", "1")
    far = ("--rpc", endpoint)
    asked = [
        (
            "calibrate",
            model,
            "-o",
            str(tmp_path / "far"),
            "--moments",
            str(tmp_path / "far.moments"),
            *read,
            *far,
        ),
        ("bench", "phases", model, "-p", "8", "-n", "2", "-r", "1", "-t", "1", *far),
        ("bench", "compare", model, "-p", "8", "-n", "4", "--seconds", "0.1", "-t", "1", *far),
        ("bench", "tune", model, "--budget", "0.1", *far),
        ("pareto", model, "--types", "Q8_0", "--seconds", "0", *read, *far),
        (
            "quantize",
            model,
            "--q8_0",
            "-o",
            str(tmp_path / "q8"),
            "--verify",
            "--verify-text",
            str(text),
            *far,
        ),
    ]
    done = subprocess.run(
        (sys.executable, "-c", COMMANDS, json.dumps(asked)), capture_output=True, text=True
    )
    told = [json.loads(line[5:]) for line in done.stderr.splitlines() if line.startswith("DONE ")]
    assert len(told) == len(asked), done.stderr
    for words, (code, layers) in zip(asked, told, strict=True):
        assert code == 0 and layers and all(layers), (words, code, layers, done.stderr)
    words = ("-o", str(tmp_path / "here"), "--moments", str(tmp_path / "here.moments"), *read)
    assert llmcli("calibrate", model, *words).code == 0
    here, there = (imatrix.load_imatrix(tmp_path / name).entries for name in ("here", "far"))
    assert list(here) == list(there)
    for name, one in here.items():
        np.testing.assert_allclose(
            one.mean_squares(0, 1, one.count), there[name].mean_squares(0, 1, one.count), rtol=1e-3
        )
    mine, other = (
        moments.load_moments(tmp_path / f"{name}.moments").inputs for name in ("here", "far")
    )
    assert [(one.names, one.mixed) for one in mine] == [(one.names, one.mixed) for one in other]
    for one, far_one in zip(mine, other, strict=True):
        np.testing.assert_allclose(
            one.sums(), far_one.sums(), rtol=1e-3, atol=1e-3 * one.sums().max()
        )


def test_the_receipt_tells_what_the_worker_holds(
    worker: tuple[str, subprocess.Popen[str]], stories_gguf: Path
) -> None:
    endpoint, _ = worker
    done = subprocess.run(
        (sys.executable, "-c", SHARES, endpoint, str(stories_gguf)), capture_output=True, text=True
    )
    told, found = json.loads(done.stdout)
    assert [one["device"] for one in told] == ["CPU", "RPC0"]
    for here, there in zip(told, found, strict=True):
        assert [here[part] for part in ("weights", "kv", "output")] == [
            there[part] for part in ("weights", "kv", "output")
        ]
    assert told[0]["kv"] == 0 < told[1]["kv"]
    assert told[1]["compute"] >= found[1]["compute"]


def test_a_worker_lost_in_mid_answer_is_one_line(
    worker: tuple[str, subprocess.Popen[str]], stories_gguf: Path
) -> None:
    endpoint, process = worker
    words = (
        "run",
        str(stories_gguf),
        *PLAIN,
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


def test_a_worker_lost_in_a_chat_leaves_the_terminal_as_it_was(
    worker: tuple[str, subprocess.Popen[str]], stories_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, process = worker
    monkeypatch.setenv("TERM", "xterm")
    (ours, theirs), said = pty.openpty(), b""
    before = termios.tcgetattr(theirs)
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
            (*COMMAND, *words), stdin=theirs, stdout=theirs, stderr=theirs
        ) as running:
            while b">>>" not in said:
                said += _more(ours)
            os.write(ours, b"Once\r")
            asked = len(said)
            while len(said) < asked + 600:  # the line drawn anew, then the answer
                said += _more(ours)
            process.kill()
            while running.poll() is None:
                if select.select([ours], [], [], 0.1)[0]:
                    said += os.read(ours, 4096)
            while select.select([ours], [], [], 0)[0]:
                said += os.read(ours, 4096)
        assert running.returncode == 1
        assert f"\r\nerror: lost a worker: {endpoint}\r\nhint: ".encode() in said
        assert termios.tcgetattr(theirs) == before
    finally:
        os.close(ours)
        os.close(theirs)


def _more(terminal: int) -> bytes:
    assert select.select([terminal], [], [], 60)[0], "nothing more is said"
    return os.read(terminal, 4096)


def test_what_is_refused(llmcli: Llmcli, tmp_path: Path) -> None:
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
        (("quantize", "x.gguf", "--q8_0", "--rpc", "a"), 2, "--rpc and -ts have no effect"),
        (
            ("quantize", "x.gguf", "--target-size", "1M", "-ts", "1"),
            2,
            "--rpc and -ts have no effect",
        ),
    ):
        done = llmcli(*words)
        assert done.code == code, (words, done)
        assert message in done.err, (words, done.err)


def test_a_port_that_is_taken(llmcli: Llmcli) -> None:
    with create_server(("127.0.0.1", 0)) as taken:
        done = llmcli("worker", "--rpc", "--port", str(taken.getsockname()[1]))
    assert done.code == 1
    assert "cannot listen on" in done.err
