#!/usr/bin/env python3
"""Install llmcli from this checkout in every ordinary way, each into a new environment, and use it.

usage: python3 scripts/build/check_installs.py [--ways pip,wheel,pipx,uv] [--llama-wheel FILE]

The ways are `pip install FOLDER`, a wheel that pip builds and then installs, `pipx install FOLDER`,
and `uv tool install FOLDER`. Each installed llmcli then prints its version and which of its parts
are active, pulls a local checkpoint, quantizes it with a search, and runs the result.

llama.cpp is compiled once, by pip with CMAKE_ARGS, and all ways use that wheel. --llama-wheel uses a
wheel that is there already. The packages come from the package index. Each command and what it
printed is shown. The exit code is 1 if a command fails, a hint names a script of the checkout, or a
part of our C code is not active.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STORIES = ROOT / "tests" / "data" / "stories260K"
WAYS = ("pip", "wheel", "pipx", "uv")
SHOWN_LINES = 6  # of the output of a command
C_PARTS = ("scans of logits", "search of scales", "encoders of Q4_K, Q5_K, Q6_K")


class Failure(Exception):
    """A command failed, or its output is not as it should be."""


def main() -> None:
    """Install in every way, use each installation, and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--llama-wheel", type=Path)
    args = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory(prefix="llmcli-installs-") as name:
        folder = Path(name)
        environment = clean_environment(folder)
        tools = make_environment(folder / "tools", environment)
        show([*tools, "-m", "pip", "install", "--quiet", "pipx", "uv"], environment, folder)
        wheels = folder / "wheels"
        wheels.mkdir()
        if args.llama_wheel:
            shutil.copy(args.llama_wheel, wheels)
        else:
            build_llama(tools, wheels, environment, folder)
        environment |= {"PIP_FIND_LINKS": str(wheels), "UV_FIND_LINKS": str(wheels)}
        for way in args.ways.split(","):
            print(f"\n== {way}", flush=True)
            try:
                use(install(way, folder / way, tools, environment), folder / way, environment)
            except Failure as failure:
                print(f"FAILED: {failure}", flush=True)
                failed.append(way)
    print(f"\n{args.ways}: {'failed: ' + ', '.join(failed) if failed else 'all work'}")
    raise SystemExit(1 if failed else 0)


def clean_environment(folder: Path) -> dict[str, str]:
    """Return the environment with all files of pipx, uv and llmcli in `folder`, and without what
    leads Python to the checkout. uv gets pip's package index.
    """
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {
        "LLMCLI_HOME": str(folder / "home"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIPX_HOME": str(folder / "pipx-home"),
        "PIPX_BIN_DIR": str(folder / "pipx-bin"),
        "PIPX_MAN_DIR": str(folder / "pipx-man"),
        "UV_TOOL_DIR": str(folder / "uv-tools"),
        "UV_TOOL_BIN_DIR": str(folder / "uv-bin"),
        "UV_CACHE_DIR": str(folder / "uv-cache"),
        "UV_PYTHON": sys.executable,
    }
    index = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"],
        capture_output=True,
        text=True,
        check=False,
    )
    if index.returncode == 0:
        environment["UV_DEFAULT_INDEX"] = index.stdout.strip()
    return environment


def make_environment(folder: Path, environment: dict[str, str]) -> list[str]:
    """Make a virtual environment and return the command of its Python."""
    show([sys.executable, "-m", "venv", str(folder)], environment, folder.parent)
    return [str(folder / "bin" / "python")]


def build_llama(python: list[str], wheels: Path, environment: dict[str, str], folder: Path) -> None:
    """Compile the version of llama-cpp-python that llmcli requires into a wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = (text for text in project["dependencies"] if text.startswith("llama-cpp-python"))
    command = [*python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels)]
    show([*command, "--no-binary", "llama-cpp-python", wanted], environment, folder)


def install(way: str, folder: Path, tools: list[str], environment: dict[str, str]) -> Path:
    """Install llmcli in one of WAYS, and return the path of its command."""
    folder.mkdir()
    if way == "pipx":
        show([*tools, "-m", "pipx", "install", str(ROOT)], environment, folder)
        return Path(environment["PIPX_BIN_DIR"], "llmcli")
    if way == "uv":
        show([*tools, "-m", "uv", "tool", "install", str(ROOT)], environment, folder)
        return Path(environment["UV_TOOL_BIN_DIR"], "llmcli")
    python = make_environment(folder / "venv", environment)
    what = str(ROOT)
    if way == "wheel":
        command = [
            *tools,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--wheel-dir",
            "dist",
            what,
        ]
        show(command, environment, folder)
        (wheel,) = (folder / "dist").glob("llmcli-*.whl")
        what = str(wheel)
    show([*python, "-m", "pip", "install", "--quiet", what], environment, folder)
    return folder / "venv" / "bin" / "llmcli"


def use(llmcli: Path, folder: Path, environment: dict[str, str]) -> None:
    """Use an installed llmcli. Raises Failure."""
    show([str(llmcli), "--version"], environment, folder)
    doctor = show([str(llmcli), "doctor", "--json"], environment, folder, prints=False)
    parts = {part["what"]: part for part in json.loads(doctor)["parts"]}
    for part in parts.values():
        print(f"  {part['what']}: {'active' if part['active'] else part['problem']}")
    show([str(llmcli), "pull", str(STORIES)], environment, folder)
    quantize = [
        str(llmcli),
        "quantize",
        str(STORIES),
        "--q4_0",
        "--method",
        "search",
        "-o",
        "q.gguf",
    ]
    printed = show(quantize, environment, folder)
    run = [str(llmcli), "run", "./q.gguf", "Once upon", "--raw", "-n", "12", "--temp", "0"]
    printed += show(run, environment, folder)
    if not parts["RPC"]["active"]:
        for refused in (["worker", "--rpc"], ["run", "./q.gguf", "x", "--rpc", "127.0.0.1:9"]):
            printed += show_refusal([str(llmcli), *refused], environment, folder)
    if "scripts/" in doctor + printed:
        raise Failure("a message names a script of the checkout")
    if missing := [name for name in C_PARTS if not parts[name]["active"]]:
        raise Failure(f"not active: {', '.join(missing)}")


def show_refusal(command: list[str], environment: dict[str, str], folder: Path) -> str:
    """Run a command that must fail with one error and a hint, and return what it printed. Raises
    Failure.
    """
    print(f"$ {shlex.join(command)}", flush=True)
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    lines = done.stderr.splitlines()
    print("".join(f"  {line}\n" for line in lines[-SHOWN_LINES:]), end="", flush=True)
    starts = [line.partition(":")[0] for line in lines[-2:]]
    is_traceback = "Traceback" in done.stderr
    if done.returncode != 1 or starts != ["error", "hint"] or is_traceback:
        raise Failure(f"status {done.returncode} instead of an error with a hint")
    return done.stderr


def show(
    command: list[str], environment: dict[str, str], folder: Path, *, prints: bool = True
) -> str:
    """Run a command in `folder` and print it, its time and the end of its output. Return the whole
    output. Raises Failure if it fails.
    """
    print(f"$ {shlex.join(command)}", flush=True)
    began = time.monotonic()
    done = subprocess.run(
        command,
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if prints else subprocess.PIPE,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines() if prints or done.returncode else []
    lines = [line for line in lines if not line.startswith("WARNING: ")]  # of pip, about its index
    print("".join(f"  {line}\n" for line in lines[-SHOWN_LINES:]), end="")
    print(f"  ({time.monotonic() - began:.0f} s)", flush=True)
    if done.returncode:
        raise Failure(f"status {done.returncode}: {done.stderr or ''}")
    return done.stdout


if __name__ == "__main__":
    main()
