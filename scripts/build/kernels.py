"""Compile the C files of llmcli to shared libraries: one for each level of CPU, so that a wheel runs
on every CPU of its architecture.

The script uses the standard library only, because it runs while a wheel is built (wheel_hook.py).
"""

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Each source with its options. Encoders must round as ggml does, which multiplies and adds in two
# steps; the others may use multiply-adds.
KERNEL_SOURCES: dict[str, tuple[str, ...]] = {
    "quant/native/cpu_level.c": ("-O3",),
    "quant/native/encoders.c": ("-O3", "-ffp-contract=off"),
    "quant/native/searches.c": ("-O3", "-ffp-contract=fast"),
    "quant/native/error_feedback.c": ("-O3", "-ffp-contract=fast"),
    "quant/native/blocks.c": ("-O3",),
    "llmcli/runtime/binding/kernels/row.c": ("-O3", "-ffp-contract=fast"),
    "llmcli/runtime/binding/kernels/row_draws.c": ("-O3",),
    "llmcli/runtime/binding/kernels/pass_thread.c": ("-O3",),
}
GEMM_SOURCES: dict[str, tuple[str, ...]] = {
    "llmcli/runtime/binding/kernels/gemm.c": ("-O3", "-ffp-contract=fast")
}
PRODUCT_SOURCES: dict[str, tuple[str, ...]] = {
    "llmcli/runtime/binding/kernels/products.c": ("-O3",),
    "llmcli/runtime/binding/kernels/attention.c": ("-O3", "-ffp-contract=fast"),
}
# -Wno-psabi: functions pass vectors only within a file
COMMON_OPTIONS = ("-std=gnu11", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wno-psabi")
REPORT_NAME = "built.json"


@dataclass(frozen=True, slots=True)
class Library:
    """A library to build: `name` without suffix, the options of its CPU level, and its sources with
    their own options.
    """

    name: str
    options: tuple[str, ...]
    sources: dict[str, tuple[str, ...]]


GENERIC = (Library("kernels-generic", (), KERNEL_SOURCES),)
ARM64 = (
    *GENERIC,
    Library("products-neon-dotprod", ("-march=armv8.2-a+dotprod",), PRODUCT_SOURCES),
)
X86_64 = (
    Library("kernels-x86-64", (), KERNEL_SOURCES),
    Library("kernels-x86-64-v3", ("-march=x86-64-v3",), KERNEL_SOURCES),
    Library("kernels-x86-64-v4", ("-march=x86-64-v4",), KERNEL_SOURCES),
    # ggml's threads are those of OpenMP, and so must be those of the products.
    Library("gemm-avx512bf16", ("-march=x86-64-v4", "-mavx512bf16", "-fopenmp"), GEMM_SOURCES),
    Library("products-x86-64-v3", ("-march=x86-64-v3",), PRODUCT_SOURCES),
    Library("products-avxvnni", ("-march=x86-64-v3", "-mavxvnni"), PRODUCT_SOURCES),
    Library("products-avx512vnni", ("-march=x86-64-v4", "-mavx512vnni"), PRODUCT_SOURCES),
)


def libraries(machine: str = platform.machine()) -> tuple[Library, ...]:
    """Return the libraries for an architecture, named as by platform.machine()."""
    if machine.lower() in ("x86_64", "amd64"):
        return X86_64
    return ARM64 if machine.lower() in ("aarch64", "arm64") else GENERIC


def suffix() -> str:
    """Return the suffix of a shared library on this system."""
    return ".dylib" if platform.system() == "Darwin" else ".so"


def find_compiler() -> list[str] | None:
    """Return the command of a C compiler that runs: CC if it is set, else the first of cc, gcc and
    clang. On macOS without developer tools, the command exists but does not run.
    """
    for command in [os.environ.get("CC", ""), "cc", "gcc", "clang"]:
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            done = subprocess.run([*words, "--version"], capture_output=True, check=False)
            if done.returncode == 0:
                return words
    return None


def build(folder: Path, compiler: Sequence[str] | None) -> dict[str, str]:
    """Build all libraries for this machine into `folder`, with a report for `llmcli doctor`. Return
    the reasons of the libraries that could not be built, by name; all have one without a compiler.
    """
    folder.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    wanted = libraries()
    if compiler is None:
        failed = {library.name: "no C compiler was found" for library in wanted}
    else:
        with (
            tempfile.TemporaryDirectory() as objects,
            ThreadPoolExecutor(os.cpu_count() or 1) as pool,
        ):

            def build_one(library: Library) -> str:
                out = folder / (library.name + suffix())
                return build_library(library, out, compiler, Path(objects))

            for library, problem in zip(wanted, pool.map(build_one, wanted), strict=True):
                if problem:
                    failed[library.name] = problem
    report = {"compiler": compiler_version(compiler) if compiler else None, "failed": failed}
    (folder / REPORT_NAME).write_text(json.dumps(report, indent=1))
    (folder / "__init__.py").write_text('"""The compiled C functions of llmcli."""\n')
    return failed


def build_library(library: Library, out: Path, compiler: Sequence[str], objects: Path) -> str:
    """Compile and link one library. Return the first line of the compiler's errors; "" for none."""
    object_paths = []
    for source, options in library.sources.items():
        object_path = objects / f"{library.name}-{Path(source).stem}.o"
        command = [*compiler, *COMMON_OPTIONS, *options, *library.options, "-c", str(ROOT / source)]
        if problem := run_compiler([*command, "-o", str(object_path)]):
            return problem
        object_paths.append(str(object_path))
    openmp = [option for option in library.options if option == "-fopenmp"]
    link = [*compiler, "-shared", "-pthread", *openmp, *object_paths, "-lm", "-o", str(out)]
    return run_compiler(link)


def run_compiler(command: Sequence[str]) -> str:
    """Run a compiler. Return its first line with an error, or "" if it succeeds."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.returncode:
        return ""
    lines = done.stderr.splitlines() or [f"{command[0]} ended with status {done.returncode}"]
    return next((line for line in lines if "error" in line), lines[0])


def compiler_version(compiler: Sequence[str]) -> str:
    """Return the first line of a compiler's --version."""
    done = subprocess.run(
        [*compiler, "--version"], capture_output=True, text=True, check=False
    ).stdout
    return next(iter(done.splitlines()), "")


def built_files(folder: Path) -> Iterator[Path]:
    """Yield the files that `build` wrote into `folder`."""
    yield from sorted(path for path in folder.iterdir() if path.is_file())


def main() -> None:
    """Build the libraries into a folder and print what is there."""
    parser = argparse.ArgumentParser(description="Compile the C files of llmcli for this machine.")
    parser.add_argument("folder", type=Path, help="where the libraries are written")
    folder = parser.parse_args().folder
    failed = build(folder, find_compiler())
    for path in built_files(folder):
        print(path)
    for name, reason in failed.items():
        print(f"{name} was not built: {reason}", file=sys.stderr)


if __name__ == "__main__":
    main()
