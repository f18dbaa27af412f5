"""The set-up scripts keep their promises: pinned versions, one wheel per build, clear refusals.

A `pip` of our own stands in for the real one where a build would take minutes; the real build is
what ran before these tests could run at all.
"""

import importlib.metadata
import importlib.util
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
    """The constraints that hold on this platform, by name."""
    lines = (SCRIPTS / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {
        canonicalize_name(pin.name): pin for pin in found if not pin.marker or pin.marker.evaluate()
    }


def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_llama", SCRIPTS / "build_llama.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def environment(folder: Path, pip: str = "works", **more: str) -> dict[str, str]:
    """A home of its own, a wheel cache of its own, and our pip before the real one."""
    (folder / "fake" / "pip").mkdir(parents=True, exist_ok=True)
    (folder / "fake" / "pip" / "__init__.py").touch()
    (folder / "fake" / "pip" / "__main__.py").write_text(FAKE_PIP)
    ours = ("CMAKE_ARGS", "LLMCLI_HOME", "CC", "CXX")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return (
        kept
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
    command = [sys.executable, str(SCRIPTS / "build_llama.py")]
    return subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=240, check=False
    )


def test_constraints_name_versions_and_never_an_address() -> None:
    for line in (SCRIPTS / "constraints.txt").read_text().splitlines():
        assert (
            not line or line.startswith("# ") or re.fullmatch(r"[\w.-]+==[\w.+]+( ; .*)?", line)
        ), line
        assert not re.search(r"://|\bwww\.|@|--|\.(com|org|net|io)\b", line), line


@pytest.mark.parametrize("wanted", [*BASE, *DEV], ids=lambda wanted: wanted.name)
def test_what_pyproject_asks_for_is_pinned_within_its_range(wanted: Requirement) -> None:
    pin = pins()[canonicalize_name(wanted.name)]
    version = str(pin.specifier).removeprefix("==")
    assert wanted.specifier.contains(version)


def test_everything_that_the_base_drags_in_is_pinned_and_none_of_it_is_for_a_gpu() -> None:
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
def test_every_script_says_how_it_is_used(name: str) -> None:
    done = subprocess.run(
        [SCRIPTS / name, "--help"], capture_output=True, text=True, cwd="/", check=True
    )
    assert done.stdout.startswith("usage: ")
    assert name in done.stdout.splitlines()[0]


def test_an_unknown_option_of_setup_is_wrong_usage() -> None:
    done = subprocess.run(
        [SCRIPTS / "setup", "--devel"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: scripts/setup")


def test_size_passes_short_code_and_names_what_is_too_long(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "short.py").write_text("def f():\n" + "    x = 1\n" * 59)
    (data / "table.py").write_text("x = 1\n" * 500)
    passed = subprocess.run(
        [SCRIPTS / "size", tmp_path], capture_output=True, text=True, check=False
    )
    assert (passed.returncode, passed.stdout) == (0, "")

    (tmp_path / "long.py").write_text("\ndef f():\n" + "    x = 1\n" * 60)
    (tmp_path / "file.py").write_text("x = 1\n" * 401)
    (tmp_path / "shell").write_text("#!/bin/sh\n" * 401)
    failed = subprocess.run(
        [SCRIPTS / "size", tmp_path], capture_output=True, text=True, check=False
    )
    assert failed.returncode == 1
    found = [line.removeprefix(f"{tmp_path}/") for line in failed.stdout.splitlines()]
    assert found == [
        "file.py: 401 lines (at most 400)",
        "long.py:2: f has 61 lines (at most 60)",
        "shell: 401 lines (at most 400)",
    ]


def test_our_own_code_is_of_a_readable_size() -> None:
    done = subprocess.run([SCRIPTS / "size"], capture_output=True, text=True, check=False)
    assert done.stdout == ""


def test_a_built_wheel_is_kept_and_used_again(tmp_path: Path) -> None:
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
    assert (again.returncode, again.stdout) == (
        0,
        first.stdout,
    )  # neither pip nor a compiler was asked
    assert build(environment(tmp_path, pip="fails")).returncode == 1  # other options, another wheel


def test_a_terminal_sees_which_step_the_build_is_at(tmp_path: Path) -> None:
    screen, terminal = os.openpty()
    command = [sys.executable, str(SCRIPTS / "build_llama.py")]
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


def test_a_wheel_belongs_to_one_version_one_set_of_options_and_one_cpu() -> None:
    module = builder()
    base = {"version": "1", "extra": "", "options": "", "cpu": "avx2", "platform": "linux-x86_64"}
    keys = {module.Build(**base).key} | {
        module.Build(**base | {field: "other"}).key for field in base
    }
    assert len(keys) == 1 + len(base)


def test_a_failed_build_shows_the_complaint_and_keeps_the_log(tmp_path: Path) -> None:
    done = build(environment(tmp_path, pip="fails"))
    assert done.returncode == 1
    assert "| ops.cpp:7: error: the compiler gave up" in done.stderr
    error, hint = done.stderr.splitlines()[-2:]
    assert error.startswith("error: llama.cpp could not be built")
    assert hint.startswith("hint: ")
    assert "[1/87]" in Path(error.rsplit(" ", 1)[1]).read_text()
    assert not list((tmp_path / "wheels").rglob("*.whl"))


def test_a_build_that_cannot_be_fetched_points_at_the_network(tmp_path: Path) -> None:
    done = build(environment(tmp_path, pip="offline"))
    assert done.returncode == 1
    assert "check the network" in done.stderr.splitlines()[-1]


def test_without_a_compiler_setup_says_which_to_install(tmp_path: Path) -> None:
    done = build(environment(tmp_path, PATH=str(tmp_path)))
    assert done.returncode == 1
    assert "there is no C compiler" in done.stderr
    assert "sudo apt install g++" in done.stderr
    assert not (tmp_path / "wheels").exists()


def test_an_interrupted_build_leaves_nothing_half_made(tmp_path: Path) -> None:
    started = tmp_path / "started"
    os.mkfifo(started)
    env = environment(tmp_path, pip="hangs", FAKE_PIP_STARTED=str(started))
    command = [sys.executable, str(SCRIPTS / "build_llama.py")]
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
    """Run a copy of setup on a machine whose only Python is the given shell script, or that has
    none.
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
def test_without_a_fit_python_setup_says_what_to_install(
    tmp_path: Path, python3: str | None, reason: str
) -> None:
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
def test_setting_up_again_has_nothing_to_do() -> None:
    done = subprocess.run(
        [SCRIPTS / "setup", "--dev"], capture_output=True, text=True, cwd="/", check=True
    )
    assert (done.stdout, done.stderr) == ("", "already set up; nothing changed\n")
