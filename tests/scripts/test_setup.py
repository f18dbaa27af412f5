"""The set-up scripts: pinned versions, one wheel for each combination of build inputs, and errors.

A fake `pip` replaces the real one, because a build takes minutes.
"""

import importlib.metadata
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.build import build_llama

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BASE = [Requirement(text) for text in PROJECT["project"]["dependencies"]]
DEV = [Requirement(text) for text in PROJECT["dependency-groups"]["dev"]]
FAKE_PIP = """\
import os, pathlib, signal, sys
out = pathlib.Path(sys.argv[sys.argv.index("--wheel-dir") + 1])
print("  [1/87] g++ -o CMakeFiles/ggml.cpp.o -c ggml.cpp", flush=True)
what = os.environ["FAKE_PIP"]
if what == "fails":
    sys.exit(print("ops.cpp:7: error: the compiler gave up") or 3)
if what == "offline":
    sys.exit(print("ERROR: No matching distribution found for llama-cpp-python") or 1)
if what == "hangs":
    pathlib.Path(os.environ["FAKE_PIP_STARTED"]).write_text("here")
    signal.pause()
out.mkdir()
(out / "llama_cpp_python-0-py3-none-any.whl").write_text(os.environ["CMAKE_ARGS"])
"""


def pins() -> dict[str, Requirement]:
    """Return the pinned versions for this platform from constraints.txt, by package name."""
    lines = (SCRIPTS / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {
        canonicalize_name(pin.name): pin for pin in found if not pin.marker or pin.marker.evaluate()
    }


def environment(folder: Path, pip: str = "works", **more: str) -> dict[str, str]:
    """Return environment variables with a home folder and a wheel cache in `folder`, and the fake
    pip. `pip`: what it does ("works", "fails", "offline" or "hangs"). `more`: other variables.
    """
    (folder / "fake" / "pip").mkdir(parents=True, exist_ok=True)
    (folder / "fake" / "pip" / "__init__.py").touch()
    (folder / "fake" / "pip" / "__main__.py").write_text(FAKE_PIP)
    removed = ("CMAKE_ARGS", "LLMCLI_HOME", "CC", "CXX")
    inherited = {name: value for name, value in os.environ.items() if name not in removed}
    return (
        inherited
        | {
            "HOME": str(folder),
            "LLMCLI_WHEEL_CACHE": str(folder / "wheels"),
            "PYTHONPATH": str(folder / "fake"),
            "FAKE_PIP": pip,
            "PIP_NO_INDEX": "1",
        }
        | more
    )


def build(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "build" / "build_llama.py")]
    return subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=240, check=False
    )


def test_constraints_have_versions_and_no_addresses() -> None:
    for line in (SCRIPTS / "constraints.txt").read_text().splitlines():
        assert (
            not line or line.startswith("# ") or re.fullmatch(r"[\w.-]+==[\w.+]+( ; .*)?", line)
        ), line
        assert not re.search(r"://|\bwww\.|@|--|\.(com|org|net|io)\b", line), line


@pytest.mark.parametrize("wanted", [*BASE, *DEV], ids=lambda wanted: wanted.name)
def test_dependencies_are_pinned_within_their_range(wanted: Requirement) -> None:
    pin = pins()[canonicalize_name(wanted.name)]
    version = str(pin.specifier).removeprefix("==")
    assert wanted.specifier.contains(version)


def test_indirect_dependencies_are_pinned_and_none_needs_a_gpu() -> None:
    seen: set[str] = set()
    todo = [*BASE]
    while todo:
        wanted = todo.pop()
        name = canonicalize_name(wanted.name)
        if name in seen or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        todo += [Requirement(text) for text in importlib.metadata.requires(name) or []]
    assert len(seen) > len(BASE)
    assert seen - set(pins()) == set()
    assert not [name for name in seen if re.match(r"torch|nvidia|cuda|triton", name)]


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux has CUDA builds under the bare name"
)
def test_the_torch_extra_on_linux_is_pinned_to_the_cpu_build() -> None:
    assert str(pins()["torch"].specifier).endswith("+cpu")


@pytest.mark.parametrize(
    "name", sorted(p.name for p in SCRIPTS.glob("*") if p.is_file() and os.access(p, os.X_OK))
)
def test_every_script_prints_its_usage(name: str) -> None:
    done = subprocess.run(
        [SCRIPTS / name, "--help"], capture_output=True, text=True, cwd="/", check=True
    )
    assert done.stdout.startswith("usage: ")
    assert name in done.stdout.splitlines()[0]


def test_setup_refuses_unknown_options() -> None:
    done = subprocess.run(
        [SCRIPTS / "setup", "--devel"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: scripts/setup")


def test_built_wheel_is_stored_and_reused(tmp_path: Path) -> None:
    first = build(environment(tmp_path, CMAKE_ARGS="-DGGML_CUDA=on"))
    wheel = Path(first.stdout.strip())
    assert first.returncode == 0
    assert "building llama.cpp" in first.stderr
    assert wheel.is_relative_to(tmp_path / "wheels")
    options = wheel.read_text()
    assert "-DGGML_RPC=on" in options
    assert "-DCMAKE_PROJECT_llama_cpp_INCLUDE=" in options
    assert options.endswith("-DGGML_CUDA=on")

    again = build(
        environment(tmp_path, pip="fails", CMAKE_ARGS="-DGGML_CUDA=on", PATH=str(tmp_path))
    )
    # The second call finds neither pip nor a compiler.
    assert (again.returncode, again.stdout) == (0, first.stdout)
    other_options = build(environment(tmp_path, pip="fails"))
    assert other_options.returncode == 1  # other options need another wheel


def test_terminal_shows_the_build_step(tmp_path: Path) -> None:
    screen, terminal = os.openpty()
    command = [sys.executable, str(SCRIPTS / "build" / "build_llama.py")]
    env = environment(tmp_path, TERM="xterm")
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=terminal, env=env, timeout=240, check=True
    )
    os.close(terminal)
    shown = os.read(screen, 1 << 16).decode()
    os.close(screen)
    assert "\r\x1b[K  0:00 [1/87] ggml.cpp" in shown
    assert (
        shown.index("building llama.cpp")
        < shown.index("[1/87]")
        < shown.index("llama.cpp is built")
    )
    assert "[1/87]" not in done.stdout.decode()


def test_wheel_key_depends_on_version_options_and_cpu() -> None:
    base = {"version": "1", "extra": "", "options": "", "cpu": "avx2", "platform": "linux-x86_64"}
    keys = {build_llama.Build(**base).key} | {
        build_llama.Build(**base | {field: "other"}).key for field in base
    }
    assert len(keys) == 1 + len(base)


def test_failed_build_shows_the_error_and_keeps_the_log(tmp_path: Path) -> None:
    done = build(environment(tmp_path, pip="fails"))
    assert done.returncode == 1
    assert "| ops.cpp:7: error: the compiler gave up" in done.stderr
    error, hint = done.stderr.splitlines()[-2:]
    assert error.startswith("error: llama.cpp could not be built")
    assert hint.startswith("hint: ")
    assert "[1/87]" in Path(error.rsplit(" ", 1)[1]).read_text()
    assert not list((tmp_path / "wheels").rglob("*.whl"))


def test_failed_download_points_at_the_network(tmp_path: Path) -> None:
    done = build(environment(tmp_path, pip="offline"))
    assert done.returncode == 1
    assert "check the network" in done.stderr.splitlines()[-1]


def test_missing_compiler_is_named(tmp_path: Path) -> None:
    done = build(environment(tmp_path, PATH=str(tmp_path)))
    assert done.returncode == 1
    assert "there is no C compiler" in done.stderr
    assert "sudo apt install g++" in done.stderr
    assert not (tmp_path / "wheels").exists()


def test_interrupted_build_leaves_no_partial_files(tmp_path: Path) -> None:
    started = tmp_path / "started"
    os.mkfifo(started)
    env = environment(tmp_path, pip="hangs", FAKE_PIP_STARTED=str(started))
    command = [sys.executable, str(SCRIPTS / "build" / "build_llama.py")]
    job = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    reader = os.open(started, os.O_RDONLY | os.O_NONBLOCK)
    assert select.select([reader], [], [], 60)[0], "the build did not start"
    os.close(reader)
    job.send_signal(signal.SIGINT)
    out, err = job.communicate(timeout=240)
    assert (job.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert not [path for path in (tmp_path / "wheels").iterdir() if path.is_dir()]
    assert build(environment(tmp_path)).returncode == 0


def checkout(folder: Path, python3: str | None) -> subprocess.CompletedProcess[str]:
    """Run a copy of scripts/setup where the only Python on the PATH is this shell script, or where
    there is no Python if `python3` is None.
    """
    shutil.copytree(SCRIPTS, folder / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    tools = folder / "bin"
    tools.mkdir()
    for name in ("bash", "cat", "dirname", "grep", "rm"):
        (tools / name).symlink_to(shutil.which(name) or name)
    if python3:
        (tools / "python3").write_text(f"#!/bin/sh\n{python3}\n")
        (tools / "python3").chmod(0o755)
    return subprocess.run(
        [tools / "bash", folder / "scripts" / "setup"],
        capture_output=True,
        text=True,
        cwd="/",
        env={"PATH": str(tools), "HOME": str(folder)},
        check=False,
    )


@pytest.mark.parametrize(
    ("python3", "reason"),
    [
        (None, "no python3 at all"),
        ("echo is Python 3.9", "python3 is Python 3.9"),
        ("exit 1", "python3 does not start"),
    ],
)
def test_missing_python_is_named(tmp_path: Path, python3: str | None, reason: str) -> None:
    done = checkout(tmp_path, python3 and f'case "$2" in *flock*) ;; *) {python3} ;; esac')
    assert (done.returncode, done.stdout) == (1, "")
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: no Python 3.11 or newer")
    assert reason in error
    assert "apt install python3" in hint
    assert not (tmp_path / ".venv").exists()


@pytest.mark.skipif(
    not (ROOT / ".venv/setup/dev").exists(), reason="not set up by scripts/setup --dev"
)
def test_second_setup_does_nothing() -> None:
    done = subprocess.run(
        [SCRIPTS / "setup", "--dev"], capture_output=True, text=True, cwd="/", check=True
    )
    assert (done.stdout, done.stderr) == ("", "already set up; nothing changed\n")
