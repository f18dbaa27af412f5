#!/usr/bin/env python3
"""Print the path of a llama-cpp-python wheel for this CPU, from the cache or built from source.

Standard library only. Messages go to stderr. The cache is keyed by version, build options and CPU,
because pip's cache ignores CMAKE_ARGS.
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
OURS = (
    "scripts/build/tile-config.h",
    "quant/native/lanes.h",
    "quant/native/encoders.c",
    "quant/native/searches.c",
    "quant/native/blocks.c",
    "llmcli/runtime/binding/kernels/row.c",
    "llmcli/runtime/binding/kernels/gemm.c",
)
BUILT_IN = tuple(ROOT / name for name in OURS)  # compiled into the libraries by OPTIONS
CPU_SECONDS = 285  # CPU seconds of a build without common, on a Zen 3 core
NEEDED_BYTES = 1_000_000_000  # the unpacked source and the object files, with a margin
SAY_EVERY = 15.0  # seconds between progress lines without a terminal


@dataclass(frozen=True, slots=True)
class Build:
    """The inputs that distinguish one wheel from another; `key` names its folder in the cache."""

    version: str
    extra: str  # the user's own CMAKE_ARGS
    # the texts of our CMake options and sources, because paths differ between checkouts
    options: str
    cpu: str
    platform: str

    @property
    def key(self) -> str:
        """Return a short name for this combination."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]

    @property
    def cmake_args(self) -> str:
        """Return the options for CMake: ours, then the user's, which take precedence."""
        ours = shlex.quote(f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={OPTIONS}")
        return f"-DGGML_RPC=on -DLLAVA_BUILD=OFF {ours} {self.extra}".strip()


def main() -> None:
    """Find or build the wheel and print its path."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    build = this_build()
    cache = cache_folder()
    home = cache / f"llama_cpp_python-{build.version}-{build.key}"
    if wheel := ready(home):
        say(f"llama.cpp {build.version}: built before for this CPU, taken from {cache}")
        print(wheel)
        return
    need_compiler()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{build.key}.lock").open("w") as lock:
        wait_for(lock)
        if not ready(home):  # another setup may have built it while this one waited
            make(build, cache, home)
    print(ready(home))


def this_build() -> Build:
    """Return the build for this checkout, this CPU and this environment."""
    pins = (ROOT / "scripts" / "constraints.txt").read_text()
    pinned = re.search(r"^llama[-_]cpp[-_]python==(\S+)", pins, re.MULTILINE)
    assert pinned, "constraints.txt does not pin llama-cpp-python"
    return Build(
        version=pinned[1],
        extra=" ".join(os.environ.get("CMAKE_ARGS", "").split()),
        options="".join(path.read_text() for path in (OPTIONS, *BUILT_IN)),
        cpu=cpu_features(),
        platform=sysconfig.get_platform(),
    )


def cpu_features() -> str:
    """Return what `-march=native` depends on: the CPU's feature flags, or else its name."""
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
    """Return the wheel cache: LLMCLI_WHEEL_CACHE, a folder in LLMCLI_HOME, or the user's cache
    folder.
    """
    env = os.environ
    if own := env.get("LLMCLI_WHEEL_CACHE"):
        return Path(own).expanduser().absolute()
    if home := env.get("LLMCLI_HOME"):
        return Path(home).expanduser().absolute() / "cache" / "wheels"
    base = env.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "llmcli" / "wheels"


def ready(home: Path) -> Path | None:
    """Return the wheel in `home`; a build is moved there only when it is complete."""
    return next(iter(sorted(home.glob("*.whl"))), None)


def need_compiler() -> None:
    """Exit with an error if no C or C++ compiler is found."""
    wanted = {"C": ("CC", ["cc", "gcc", "clang"]), "C++": ("CXX", ["c++", "g++", "clang++"])}
    for language, (variable, names) in wanted.items():
        own = shlex.split(os.environ.get(variable, ""))[:1]
        if not any(works(name) for name in own or names):
            die(
                f"llama.cpp has to be compiled for this machine, and there is no {language} compiler "
                f"(looked for {', '.join(own or names)})",
                "install one (Debian, Ubuntu: sudo apt install g++; Fedora: sudo dnf install gcc-c++; "
                "macOS: xcode-select --install) and type the same command again",
            )


def works(compiler: str) -> bool:
    """Return whether a compiler starts: on a bare macOS it exists but only offers an installation."""
    if not shutil.which(compiler):
        return False
    return subprocess.run([compiler, "--version"], capture_output=True, check=False).returncode == 0


def make(build: Build, cache: Path, home: Path) -> None:
    """Build in a temporary folder and rename the result to `home`."""
    # left by a killed run; this process has the lock
    for left in cache.glob(f"building-{build.key}-*"):
        shutil.rmtree(left, ignore_errors=True)
    if (free := shutil.disk_usage(cache).free) < NEEDED_BYTES:
        die(
            f"building llama.cpp takes about 1 GB for a while, and {cache} has {free / 1e9:.1f} GB free",
            "free some space, or name another folder in LLMCLI_WHEEL_CACHE",
        )
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    minutes = max(1, round((CPU_SECONDS / cores + 25) / 60))
    longer = f"; longer, with {build.extra}" if build.extra else ""
    say(
        f"building llama.cpp {build.version} for this CPU: about {minutes} min on {cores} cores{longer}"
    )
    log = cache / f"{build.key}.log"
    with tempfile.TemporaryDirectory(prefix=f"building-{build.key}-", dir=cache) as folder:
        out = Path(folder, "out")
        began = time.monotonic()
        compile_wheel(build, Path(folder), out, log)
        (out / "built-with.json").write_text(json.dumps(asdict(build), indent=1))
        for path in (*out.iterdir(), out):
            sync(path)
        out.rename(home)
    sync(cache)
    log.unlink()
    say(f"llama.cpp is built ({clock(time.monotonic() - began)}) and kept in {cache}")


def compile_wheel(build: Build, folder: Path, out: Path, log: Path) -> None:
    """Run pip on the source distribution; write its output to `log` and its progress to the screen."""
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
    # the common one may be cleaned in the meantime, or be a small RAM disk
    temporary = folder / "tmp"
    temporary.mkdir()
    env = os.environ | {
        "CMAKE_ARGS": build.cmake_args,
        "TMPDIR": str(temporary),
        "NINJA_STATUS": "[%f/%t] ",
    }
    with log.open("wb") as kept:
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
            follow(lines(job.stdout, kept))
            status = job.wait()
        except BaseException:
            os.killpg(job.pid, signal.SIGTERM)
            job.wait()
            raise
    if status or not ready(out):
        explain(build, log, status)


def lines(pipe: IO[bytes], kept: IO[bytes]) -> Iterator[str]:
    """Yield each line, and "" once a second without one; copy everything to `kept`."""
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            if not selector.select(timeout=1.0):
                yield ""
                continue
            chunk = os.read(pipe.fileno(), 1 << 16)
            if not chunk:
                return
            kept.write(chunk)
            kept.flush()
            *whole, rest = (rest + chunk).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)


def follow(output: Iterator[str]) -> None:
    """Show the progress of the build: one updated line on a terminal, else a line now and then."""
    live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    began = said = time.monotonic()
    doing = "fetching the source"
    for line in output:
        if step := re.match(r"\s*(\[\d+/\d+\]) .*?([\w.-]+)\s*$", line):
            doing = f"{step[1]} {step[2]}"
        elif "*** Configuring CMake" in line:
            doing = "checking the compiler"
        elif "build dependencies: started" in line:
            doing = "fetching the build tools"
        now = time.monotonic()
        if live:
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"\r\033[K{f'  {clock(now - began)} {doing}'[:width]}")
            sys.stderr.flush()
        elif now - said >= SAY_EVERY:
            said = now
            say(f"  {clock(now - began)} {doing}")
    if live:
        sys.stderr.write("\r\033[K")


def explain(build: Build, log: Path, status: int) -> NoReturn:
    """Print why there is no wheel: errors in the log, then its path."""
    text = log.read_text(errors="replace").splitlines()
    for line in complaints(text)[:12] or text[-12:]:
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


def complaints(text: list[str]) -> list[str]:
    """Return the lines with errors, and two more after each CMake error; pip's summaries are left
    out.
    """
    echo = re.compile(
        r"subprocess-exited|from a subprocess|[Ff]ailed (to )?build|finished with status|exit code"
    )
    wrong: list[str] = []
    for number, line in enumerate(text):
        if re.search(r"\berror\b", line, re.IGNORECASE) and not echo.search(line):
            more = 3 if "CMake Error" in line else 0
            wrong += [
                line,
                *(after for after in text[number + 1 : number + 1 + more] if after.strip()),
            ]
    return wrong


def wait_for(lock: IO[str]) -> None:
    """Wait for the lock, with a message if another process has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("another set-up is building the same wheel; waiting for it")
        fcntl.flock(lock, fcntl.LOCK_EX)


def sync(path: Path) -> None:
    """Flush a file or a folder's entries to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def clock(seconds: float) -> str:
    """Return minutes and seconds as 2:29."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def say(text: str) -> None:
    """Print a message to stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def die(what: str, hint: str) -> NoReturn:
    """Print what happened and what to do, and exit with 1."""
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
