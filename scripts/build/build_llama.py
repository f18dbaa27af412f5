#!/usr/bin/env python3
"""Print the path of a llama-cpp-python wheel for this CPU, from the cache or built from source.

The script uses the standard library only, because it runs before any package is installed. Messages
go to stderr. The cache is keyed by version, build options and CPU; pip's own cache ignores
CMAKE_ARGS.
"""

import fcntl
import hashlib
import json
import os
import platform
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, NoReturn

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ROOT / "scripts" / "build" / "llama.cmake"
TILE_CONFIG = ROOT / "scripts" / "build" / "tile-config.h"  # OPTIONS includes it
CPU_SECONDS = 285  # CPU seconds of a build without llama.cpp's common library, on a Zen 3 core
NEEDED_BYTES = 1_000_000_000  # the unpacked source and the object files, with a margin
PROGRESS_SECONDS = 15.0  # seconds between progress lines without a terminal


@dataclass(frozen=True, slots=True)
class Build:
    """The inputs of a build. Two builds with different inputs give different wheels.

    `extra`: the user's CMAKE_ARGS. `options`: the contents of our CMake file and header. (Their
    paths differ between checkouts.)
    """

    version: str
    extra: str
    options: str
    cpu: str
    platform: str

    @property
    def key(self) -> str:
        """A hash of all inputs, which is part of the wheel's folder name in the cache."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]

    @property
    def cmake_args(self) -> str:
        """The options for CMake: ours, then the user's. Later options take precedence."""
        ours = shlex.quote(f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={OPTIONS}")
        return f"-DGGML_RPC=on -DLLAVA_BUILD=OFF {ours} {self.extra}".strip()


def main() -> None:
    """Find the wheel in the cache or build it, and print its path."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    build = this_build()
    cache = cache_folder()
    wheel_folder = cache / f"llama_cpp_python-{build.version}-{build.key}"
    if wheel := finished_wheel(wheel_folder):
        say(f"llama.cpp {build.version}: built before for this CPU, taken from {cache}")
        print(wheel)
        return
    require_compiler()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{build.key}.lock").open("w") as lock:
        lock_or_wait(lock)
        if not finished_wheel(
            wheel_folder
        ):  # another setup may have built it while this one waited
            build_into_cache(build, cache, wheel_folder)
    print(finished_wheel(wheel_folder))


def this_build() -> Build:
    """Return the inputs of a build for this checkout, this CPU and this environment."""
    pins = (ROOT / "scripts" / "constraints.txt").read_text()
    pinned = re.search(r"^llama[-_]cpp[-_]python==(\S+)", pins, re.MULTILINE)
    assert pinned, "constraints.txt does not pin llama-cpp-python"
    return Build(
        version=pinned[1],
        extra=" ".join(os.environ.get("CMAKE_ARGS", "").split()),
        options="".join(path.read_text() for path in (OPTIONS, TILE_CONFIG)),
        cpu=cpu_features(),
        platform=sysconfig.get_platform(),
    )


def cpu_features() -> str:
    """Return the CPU's feature flags, on which `-march=native` depends. Where the system does not
    list them, return the CPU's name.
    """
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        if platform.system() == "Darwin":
            return subprocess.run(
                command, capture_output=True, text=True, check=False
            ).stdout.strip()
        return platform.processor()
    found = re.findall(r"^(?:flags|Features|CPU part|isa)\s*:\s*(.*)$", text, re.MULTILINE)
    return " ".join(sorted(set(" ".join(found).split())))


def cache_folder() -> Path:
    """Return the folder of built wheels: LLMCLI_WHEEL_CACHE if it is set, else a folder in
    LLMCLI_HOME if that is set, else a folder in the user's cache folder.
    """
    env = os.environ
    if chosen := env.get("LLMCLI_WHEEL_CACHE"):
        return Path(chosen).expanduser().absolute()
    if llmcli_home := env.get("LLMCLI_HOME"):
        return Path(llmcli_home).expanduser().absolute() / "cache" / "wheels"
    base = env.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "llmcli" / "wheels"


def finished_wheel(folder: Path) -> Path | None:
    """Return the wheel in `folder`, or None. A build is moved to its folder only when it is
    complete, so a wheel that is there is usable.
    """
    return next(iter(sorted(folder.glob("*.whl"))), None)


def require_compiler() -> None:
    """Exit with an error unless both a C and a C++ compiler are found."""
    wanted = {"C": ("CC", ["cc", "gcc", "clang"]), "C++": ("CXX", ["c++", "g++", "clang++"])}
    for language, (variable, names) in wanted.items():
        chosen = shlex.split(os.environ.get(variable, ""))[:1]
        if not any(compiler_starts(name) for name in chosen or names):
            die(
                f"llama.cpp has to be compiled for this machine, and there is no {language} compiler "
                f"(looked for {', '.join(chosen or names)})",
                "install one (Debian, Ubuntu: sudo apt install g++; Fedora: sudo dnf install gcc-c++; "
                "macOS: xcode-select --install) and type the same command again",
            )


def compiler_starts(compiler: str) -> bool:
    """Return whether a compiler runs. On macOS without developer tools, the command exists but only
    offers to install them.
    """
    if not shutil.which(compiler):
        return False
    return subprocess.run([compiler, "--version"], capture_output=True, check=False).returncode == 0


def build_into_cache(build: Build, cache: Path, wheel_folder: Path) -> None:
    """Build the wheel in a temporary folder of the cache, and rename that to `wheel_folder`. The
    caller has the lock of this build.
    """
    # Folders of killed runs; no other process is building, because this one has the lock.
    for leftover in cache.glob(f"building-{build.key}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    if (free := shutil.disk_usage(cache).free) < NEEDED_BYTES:
        die(
            f"building llama.cpp takes about 1 GB for a while, and {cache} has {free / 1e9:.1f} GB free",
            "free some space, or name another folder in LLMCLI_WHEEL_CACHE",
        )
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    minutes = max(1, round((CPU_SECONDS / cores + 25) / 60))
    warning = f"; longer, with {build.extra}" if build.extra else ""
    say(
        f"building llama.cpp {build.version} for this CPU: about {minutes} min on {cores} cores{warning}"
    )
    log = cache / f"{build.key}.log"
    with tempfile.TemporaryDirectory(prefix=f"building-{build.key}-", dir=cache) as folder:
        out = Path(folder, "out")
        began = time.monotonic()
        compile_wheel(build, Path(folder), out, log)
        (out / "built-with.json").write_text(json.dumps(asdict(build), indent=1))
        for path in (*out.iterdir(), out):
            sync(path)
        out.rename(wheel_folder)
    sync(cache)
    log.unlink()
    say(f"llama.cpp is built ({clock(time.monotonic() - began)}) and kept in {cache}")


def compile_wheel(build: Build, folder: Path, out: Path, log: Path) -> None:
    """Build the wheel from the source distribution by pip, and write it to `out`. pip's output goes
    to `log`, and its progress to stderr. Exits with an error message if pip fails.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-v",
        "--no-deps",
        "--no-cache-dir",
        "--progress-bar",
        "off",
        "--no-binary",
        "llama-cpp-python",
        "--wheel-dir",
        str(out),
        f"llama-cpp-python=={build.version}",
    ]
    # The system's temporary folder may be cleaned during the build, or be a small RAM disk.
    temporary = folder / "tmp"
    temporary.mkdir()
    env = os.environ | {
        "CMAKE_ARGS": build.cmake_args,
        "TMPDIR": str(temporary),
        "NINJA_STATUS": "[%f/%t] ",
    }
    with log.open("wb") as log_file:
        job = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that one signal ends pip, ninja and every compiler
        )
        try:
            assert job.stdout
            show_progress(lines(job.stdout, log_file))
            status = job.wait()
        except BaseException:
            os.killpg(job.pid, signal.SIGTERM)
            job.wait()
            raise
    if status or not finished_wheel(out):
        fail_with_log(build, log, status)


def lines(pipe: IO[bytes], log_file: IO[bytes]) -> Iterator[str]:
    """Yield each line of a process's output, and "" after each second without output. Copy all
    output to `log_file`.
    """
    partial = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            if not selector.select(timeout=1.0):
                yield ""
                continue
            chunk = os.read(pipe.fileno(), 1 << 16)
            if not chunk:
                return
            log_file.write(chunk)
            log_file.flush()
            *complete, partial = (partial + chunk).split(b"\n")
            yield from (line.decode(errors="replace") for line in complete)


def show_progress(output: Iterator[str]) -> None:
    """Show the progress of a build from its lines of output: one updated line on a terminal, else a
    new line every PROGRESS_SECONDS.
    """
    on_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    began = last_line_at = time.monotonic()
    step_name = "fetching the source"
    for line in output:
        if step := re.match(r"\s*(\[\d+/\d+\]) .*?([\w.-]+)\s*$", line):
            step_name = f"{step[1]} {step[2]}"
        elif "*** Configuring CMake" in line:
            step_name = "checking the compiler"
        elif "build dependencies: started" in line:
            step_name = "fetching the build tools"
        now = time.monotonic()
        if on_terminal:
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"\r\033[K{f'  {clock(now - began)} {step_name}'[:width]}")
            sys.stderr.flush()
        elif now - last_line_at >= PROGRESS_SECONDS:
            last_line_at = now
            say(f"  {clock(now - began)} {step_name}")
    if on_terminal:
        sys.stderr.write("\r\033[K")


def fail_with_log(build: Build, log: Path, status: int) -> NoReturn:
    """Print the errors of a failed build and the path of its log, and exit with 1. `status` is
    pip's exit status.
    """
    text = log.read_text(errors="replace").splitlines()
    for line in error_lines(text)[:12] or text[-12:]:
        say(f"  | {line.strip()[:200]}")
    if any("No matching distribution found" in line for line in text):
        die(
            f"pip found no source of llama-cpp-python {build.version}, or could not reach its index",
            "check the network and where pip looks (pip config list), and type the same command again",
        )
    options = f" with CMAKE_ARGS={shlex.quote(build.extra)}" if build.extra else ""
    die(
        f"llama.cpp could not be built{options} (pip ended with status {status}); the whole log: {log}",
        "fix the error in the log and type the same command again",
    )


def error_lines(text: list[str]) -> list[str]:
    """Return the lines of a build log that report errors. After a CMake error, up to three
    following lines are included, because they have its text. pip's summaries are excluded.
    """
    echo = re.compile(
        r"subprocess-exited|from a subprocess|[Ff]ailed (to )?build|finished with status|exit code"
    )
    errors: list[str] = []
    for number, line in enumerate(text):
        if re.search(r"\berror\b", line, re.IGNORECASE) and not echo.search(line):
            n_following = 3 if "CMake Error" in line else 0
            errors += [
                line,
                *(
                    following
                    for following in text[number + 1 : number + 1 + n_following]
                    if following.strip()
                ),
            ]
    return errors


def lock_or_wait(lock: IO[str]) -> None:
    """Lock the file. If another process has the lock, print a message and wait."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("another set-up is building the same wheel; waiting for it")
        fcntl.flock(lock, fcntl.LOCK_EX)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def clock(seconds: float) -> str:
    """Return a duration as minutes and seconds, such as 2:29."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def say(text: str) -> None:
    """Print a message to stderr at once, without buffering."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def die(what: str, hint: str) -> NoReturn:
    """Print an error and a hint what to do, and exit with 1."""
    say(f"error: {what}\nhint: {hint}")
    raise SystemExit(1)


if __name__ == "__main__":
    if "--help" in sys.argv[1:]:
        print(
            "usage: scripts/build/build_llama.py   print the path of a llama.cpp wheel, built for this CPU if needed"
        )
        raise SystemExit(0)
    try:
        main()
    except KeyboardInterrupt:
        say("\nstopped; no partial files are left")
        raise SystemExit(130) from None
