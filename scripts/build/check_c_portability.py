#!/usr/bin/env python3
"""Check that the C files of llmcli compile with every compiler found here and for other processors,
and that they give the same results there.

usage: .venv/bin/python scripts/build/check_c_portability.py [--syntax] [--ggml FOLDER]

The kernels of products (product_results.c) must give the same bits for every set of instructions;
emulated_vnni.h stands in for instructions that this CPU may lack. Attention (attention_results.c)
may differ by ATTENTION_TOLERANCE.

Compilers are gcc and clang in all installed versions, the cross compilers for aarch64 (Debian:
gcc-aarch64-linux-gnu and libc6-dev-arm64-cross), and ziglang (a Python package), which knows macOS.
--syntax only parses, which takes seconds. Without it, every build of kernel_results.c runs, those
for aarch64 under qemu-aarch64 (Debian: qemu-user), and its cases are compared with those of gcc for
plain x86-64:

- "exact" cases are equal everywhere: encoders, packing, F16 conversion, the likeliest token.
- "lanes" cases are equal where a vector has as many floats, because a row of logits is divided into
  strands by its width. aarch64 and plain x86-64 have four.
- "float" cases, the search for scales and the sum of exponentials, are equal too, if multiply-adds
  are not contracted. As shipped they are, which rounds once instead of twice. Then the error that a
  search leaves may differ by SEARCH_TOLERANCE, and a sum by SUM_TOLERANCE.

--ggml also compares ggml_backend.h with the headers in a source tree of ggml. The exit code is 1 if
anything fails.
"""

import argparse
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.build import kernels

ROOT = kernels.ROOT
RESULTS = ROOT / "scripts" / "build" / "kernel_results.c"
PRODUCT_RESULTS, ATTENTION_RESULTS = "product_results.c", "attention_results.c"
ATTENTION_WORDS = 3  # in a line of attention_results.c
BACKEND_HEADER = ROOT / "llmcli" / "runtime" / "binding" / "kernels" / "ggml_backend.h"
SEARCH_TOLERANCE = 0.02  # of the values' weighted squares; other codes can be equally good
SUM_TOLERANCE = 1e-6  # relative
ATTENTION_TOLERANCE = 1e-5  # relative
# name of a flag set -> options. The first one is the reference; the second one is the code without
# any instruction set.
X86_OPTIONS: dict[str, tuple[str, ...]] = {
    "SSE2": (),
    "no SSE2": ("-U__SSE2__",),
    "no AVX-512": ("-march=native", "-mno-avx512f"),
    "x86-64-v3": ("-march=x86-64-v3",),
    "x86-64-v4": ("-march=x86-64-v4",),
}
ZIG_OPTIONS: dict[str, tuple[str, ...]] = {
    "SSE2": (),
    "no SSE2": ("-U__SSE2__",),
    "x86-64-v3": ("-mcpu=x86_64_v3",),
    "x86-64-v4": ("-mcpu=x86_64_v4",),
}
# With -O2 the emulation takes a minute to compile.
EMULATED = ("-O1", f"-include{ROOT}/scripts/build/emulated_vnni.h")
# The kernels of products: a label, the options, and the architecture. The first one is the reference.
PRODUCT_BUILDS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("AVX2", ("-march=x86-64-v3",), "x86_64"),
    ("AVX-VNNI, emulated", ("-march=x86-64-v3", *EMULATED), "x86_64"),
    ("AVX-512, emulated", ("-march=x86-64-v3", "-DEMULATE_AVX512", *EMULATED), "x86_64"),
    ("AVX-VNNI", ("-march=x86-64-v3", "-mavxvnni"), "x86_64"),
    ("AVX-512", ("-march=x86-64-v4", "-mavx512vnni"), "x86_64"),
    ("NEON", ("-march=armv8.2-a+dotprod",), "aarch64"),
)
GEMM_OPTIONS = ("-march=x86-64-v4", "-mavx512bf16", "-fopenmp")
NATIVE = platform.machine().lower()


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler: its name, its command, the architecture that it compiles for, and whether its
    programs can be linked and run here (`runner`: the emulator, or nothing).
    """

    name: str
    command: tuple[str, ...]
    machine: str
    can_link: bool
    runner: tuple[str, ...] = ()

    @property
    def flag_sets(self) -> dict[str, tuple[str, ...]]:
        """The sets of options to check, by name."""
        if self.machine != "x86_64":
            return {"plain": ()}
        return X86_OPTIONS if self.can_link else ZIG_OPTIONS


def main() -> None:
    """Check everything, print a line for each check, and exit with 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--syntax", action="store_true", help="only parse the files")
    parser.add_argument("--ggml", type=Path, help="a source tree of ggml to compare with")
    args = parser.parse_args()
    compilers = find_compilers()
    if not compilers:
        print("no C compiler was found: nothing is checked")
        return
    check = check_syntax if args.syntax else check_results
    ok = check(compilers)
    if args.ggml:
        ok &= compare_headers(args.ggml)
    raise SystemExit(0 if ok else 1)


def find_compilers() -> list[Compiler]:
    """Return the compilers that are installed here."""
    found = []
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep)]
    # a folder in PATH may not exist, or may not be readable for this user
    readable = [path for path in folders if os.access(path, os.R_OK | os.X_OK) and path.is_dir()]
    names = sorted({path.name for folder in readable for path in folder.iterdir()})
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    runner = (emulator,) if emulator else ()
    seen: set[str] = set()
    for name in names:
        if not re.fullmatch(r"(aarch64-linux-gnu-)?(gcc|clang)(-\d+)?", name):
            continue
        path = os.path.realpath(shutil.which(name) or name)
        if path in seen or not kernels.compiler_version([name]):
            continue
        seen.add(path)
        if name.startswith("aarch64"):
            found.append(Compiler(name, (name, "-static"), "aarch64", True, runner))
            continue
        found.append(Compiler(name, (name,), NATIVE, True))
        if name.startswith("clang") and shutil.which("aarch64-linux-gnu-ld"):
            command = (name, "--target=aarch64-linux-gnu", "-static")
            found.append(Compiler(f"{name} for aarch64", command, "aarch64", True, runner))
    if importlib.util.find_spec("ziglang"):
        zig = (sys.executable, "-m", "ziglang", "cc", "-target")
        found += [
            Compiler(f"ziglang for {target}", (*zig, target), target.partition("-")[0], False)
            for target in ("aarch64-macos", "x86_64-macos")
        ]
    return found


def check_syntax(compilers: list[Compiler]) -> bool:
    """Parse every file with every compiler and flag set, and print a line for each compiler. Return
    whether all succeed without a warning.
    """
    sources = [*kernels.KERNEL_SOURCES, str(RESULTS.relative_to(ROOT))]
    ok = True
    for compiler in compilers:
        problems, skipped = [], ""
        parse = [*compiler.command, *kernels.COMMON_OPTIONS, "-Wall", "-Wextra", "-Werror"]
        parse += ["-fsyntax-only"] if compiler.can_link else ["-c", "-o", os.devnull]
        for flags, options in compiler.flag_sets.items():
            for source in sources:
                if problem := kernels.run_compiler([*parse, *options, str(ROOT / source)]):
                    problems.append(f"{flags}, {source}: {problem}")
        if compiler.machine == "x86_64" and compiler.can_link:
            for source in kernels.GEMM_SOURCES:
                problem = kernels.run_compiler([*parse, *GEMM_OPTIONS, str(ROOT / source)])
                if "omp.h" in problem or "libomp" in problem or "-fopenmp" in problem:
                    skipped = "; gemm.c not checked: this compiler lacks OpenMP"
                elif problem:
                    problems.append(f"{source}: {problem}")
        for name, options, machine in PRODUCT_BUILDS:
            if machine == compiler.machine:
                for source in kernels.PRODUCT_SOURCES:
                    if problem := kernels.run_compiler([*parse, *options, str(ROOT / source)]):
                        problems.append(f"{source}, {name}: {problem}")
        count = len(compiler.flag_sets)
        verdict = "FAILED" if problems else "ok"
        print(f"{compiler.name}: {count} sets of flags, {len(sources)} files: {verdict}{skipped}")
        print("".join(f"  {problem}\n" for problem in problems), end="")
        ok &= not problems
    return ok


def check_results(compilers: list[Compiler]) -> bool:
    """Build and run kernel_results.c with every compiler and flag set, with and without contracted
    multiply-adds, and compare its cases with the reference. Return whether all are as they should.
    """
    ok = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reference: list[str] = []
        for compiler in sorted(compilers, key=lambda one: not one.name.startswith("gcc")):
            for flags, options in compiler.flag_sets.items():
                for contracts in (False, True):
                    label = f"{compiler.name}, {flags}, {'as shipped' if contracts else 'contracted off'}"
                    program = folder / re.sub(r"\W+", "-", label)
                    problem = build_program(compiler, options, contracts, folder, program)
                    if problem or not compiler.can_link:
                        print(f"{label}: {problem or 'compiles'}")
                        ok &= not problem
                        continue
                    lines = run_program(compiler, program, label)
                    if lines is None:
                        continue
                    if not reference and flags in ("SSE2", "plain") and not contracts:
                        reference = lines
                    if reference:
                        ok &= compare(label, lines, reference)
        ok &= check_products(compilers, folder)
    return ok


def check_products(compilers: list[Compiler], folder: Path) -> bool:
    """Build and run product_results.c and attention_results.c with every compiler and set of
    instructions, and print a line for each. Return whether the results are as they should be.
    """
    ok = True
    references: dict[str, list[str]] = {}
    for compiler in sorted(compilers, key=lambda one: not one.name.startswith("gcc")):
        for name, options, machine in PRODUCT_BUILDS:
            if machine != compiler.machine or not compiler.can_link:
                continue
            programs, problem = build_results(compiler, options, folder)
            if problem:
                print(f"{compiler.name}, products with {name}: FAILED: {problem}")
                ok = False
            for results, program in programs.items():
                label = f"{compiler.name}, {results} with {name}"
                lines = run_program(compiler, program, label)
                if lines is None:
                    continue
                is_right = has_results(lines, references.setdefault(results, lines))
                print(f"{label}: {len(lines)} cases, {'ok' if is_right else 'FAILED'}")
                ok &= is_right
    return ok


def build_results(
    compiler: Compiler, options: tuple[str, ...], folder: Path
) -> tuple[dict[str, Path], str]:
    """Compile product_results.c and attention_results.c to programs in `folder`. Return them by the
    name of the file, and the first error or "".
    """
    command = [*compiler.command, *kernels.COMMON_OPTIONS, "-O2", *options]
    objects = []
    for source in kernels.PRODUCT_SOURCES:
        path = folder / f"{Path(source).stem}.o"
        if problem := kernels.run_compiler([*command, "-c", str(ROOT / source), "-o", str(path)]):
            return {}, problem
        objects.append(str(path))
    programs = {}
    for results in (PRODUCT_RESULTS, ATTENTION_RESULTS):
        out = folder / Path(results).stem
        main = str(RESULTS.with_name(results))
        if problem := kernels.run_compiler([*command, main, *objects, "-lm", "-o", str(out)]):
            return {}, problem
        programs[results] = out
    return programs, ""


def has_results(lines: list[str], reference: list[str]) -> bool:
    """Return whether the lines of product_results.c equal those of the reference, or the sums of
    attention_results.c are near them.
    """
    if lines == reference:
        return True
    sums, wanted = (
        {name: float(value) for name, value in (line.rsplit(" ", 1) for line in each)}
        for each in (lines, reference)
    )
    is_attention = len(reference[0].split()) == ATTENTION_WORDS
    return (
        is_attention
        and sums.keys() == wanted.keys()
        and all(
            abs(sums[name] - value) <= ATTENTION_TOLERANCE * max(1.0, abs(value))
            for name, value in wanted.items()
        )
    )


def build_program(
    compiler: Compiler, options: tuple[str, ...], contracts: bool, folder: Path, out: Path
) -> str:
    """Compile the C files and kernel_results.c to a program, or only to objects for a compiler that
    cannot link. Return the first error, or "".
    """
    objects = []
    sources = dict(kernels.KERNEL_SOURCES) | {str(RESULTS.relative_to(ROOT)): ("-O1",)}
    for source, own in sources.items():
        keeps = contracts and "-ffp-contract=fast" in own
        flags = [flag for flag in own if not flag.startswith("-ffp-contract")]
        flags.append(f"-ffp-contract={'fast' if keeps else 'off'}")
        path = folder / f"{Path(source).stem}.o"
        level = () if source.endswith(RESULTS.name) else options
        command = [*compiler.command, *kernels.COMMON_OPTIONS, *flags, *level]
        if problem := kernels.run_compiler([*command, "-c", str(ROOT / source), "-o", str(path)]):
            return problem
        objects.append(str(path))
    if not compiler.can_link:
        return ""
    return kernels.run_compiler([*compiler.command, *objects, "-lm", "-pthread", "-o", str(out)])


def run_program(compiler: Compiler, program: Path, label: str) -> list[str] | None:
    """Return the lines that a program prints. Return None, and say why, if it cannot run here."""
    if compiler.machine != NATIVE and not compiler.runner:
        print(f"{label}: compiles; not run, because qemu-aarch64 is not here")
        return None
    done = subprocess.run(
        [*compiler.runner, str(program)], capture_output=True, text=True, check=False
    )
    if done.returncode == -4:  # SIGILL: this CPU is of a lower level
        print(f"{label}: compiles; not run, because this CPU lacks its instructions")
        return None
    return done.stdout.splitlines() if done.returncode == 0 else [f"status {done.returncode}"]


def compare(label: str, lines: list[str], reference: list[str]) -> bool:
    """Compare the cases of a program with the reference, print a summary, and return whether all
    differences are allowed.
    """
    if len(lines) != len(reference):
        print(f"{label}: FAILED: {len(lines)} lines instead of {len(reference)}: {lines[:1]}")
        return False
    same_width = four_lanes(label)
    counts = {"equal": 0, "near": 0, "other width": 0}
    for line, expected in zip(lines, reference, strict=True):
        kind, name, *_ = line.split()
        if line == expected:
            counts["equal"] += 1
        elif kind == "lanes" and not same_width:
            counts["other width"] += 1
        elif kind == "float" and is_near(line, expected) and not must_be_equal(label, name):
            counts["near"] += 1
        else:
            print(f"{label}: FAILED: {line} instead of {expected}")
            return False
    print(
        f"{label}: {len(lines)} cases, {', '.join(f'{n} {what}' for what, n in counts.items() if n)}"
    )
    return True


def four_lanes(label: str) -> bool:
    """Return whether the vectors of a build have four floats, as in the reference."""
    return not any(words in label for words in ("v3", "v4", "no AVX-512"))


def must_be_equal(label: str, name: str) -> bool:
    """Return whether a "float" case of a build must equal the reference's: without contraction
    always for the search, and for sums if vectors have as many floats.
    """
    if "as shipped" in label:
        return False
    return four_lanes(label) or not name.startswith("look/")


def is_near(line: str, expected: str) -> bool:
    """Return whether the numbers of a "float" case differ within the tolerances."""
    *_, found, size = line.split()
    name, *_, wanted, _ = expected.split()[1:]
    difference = abs(float(found) - float(wanted))
    if name.startswith("look/"):
        return difference <= SUM_TOLERANCE * abs(float(wanted))
    return difference <= SEARCH_TOLERANCE * float(size)


def compare_headers(tree: Path) -> bool:
    """Compare the structures and numbers of ggml_backend.h with those of a source tree of ggml, by
    two programs that print them. Print a line and return whether they are equal.
    """
    # the rest are C++ classes, and structures that are not nested here
    text = BACKEND_HEADER.read_text().partition("// ---- ggml-cpu")[0]
    text = re.sub(r"//.*", "", text)
    prints = []
    for name, body in re.findall(r"^struct (\w+) \{(.*?)^\};", text, re.MULTILINE | re.DOTALL):
        if name == "ggml_functions":  # ours
            continue
        if name != "ggml_cgraph":  # we have only its beginning
            prints.append(f'printf("{name} %zu\\n", sizeof(struct {name}));')
        body = re.sub(
            r"\(\*(\w+)\)(\([^)]*\)|\[\d+\])", r"\1", body
        )  # pointers to functions and arrays
        for field in re.findall(r"(\w+)(?:\[\d+\])?\s*[,;]", body):
            prints.append(f'printf("{name}.{field} %zu\\n", offsetof(struct {name}, {field}));')
    for constant in sorted(set(re.findall(r"\b(GGML_[A-Z0-9_]+) =", text))):
        prints.append(f'printf("{constant} %d\\n", (int){constant});')
    prints.append('printf("API %d\\n", GGML_BACKEND_API_VERSION);')
    ours = [f'"{BACKEND_HEADER}"']
    theirs = ['"ggml.h"', '"ggml-backend-impl.h"', '"ggml-impl.h"']
    outputs = []
    with tempfile.TemporaryDirectory() as folder:
        for number, headers in enumerate((ours, theirs)):
            source, program = Path(folder, f"{number}.c"), Path(folder, f"{number}")
            includes = "".join(
                f"#include {name}\n" for name in ["<stdio.h>", "<stddef.h>", *headers]
            )
            source.write_text(f"{includes}int main(void) {{ {' '.join(prints)} }}\n")
            paths = [f"-I{tree / part}" for part in ("include", "src")]
            command = ["cc", "-O2", *paths, "-Wl,--unresolved-symbols=ignore-all", str(source)]
            if problem := kernels.run_compiler([*command, "-o", str(program)]):
                print(f"ggml_backend.h: FAILED: {problem}")
                return False
            outputs.append(
                subprocess.run([program], capture_output=True, text=True, check=True).stdout
            )
    different = set(outputs[0].splitlines()) ^ set(outputs[1].splitlines())
    print(f"ggml_backend.h: {len(prints)} numbers compared, {len(different) // 2} differ")
    print("".join(f"  {line}\n" for line in sorted(different)), end="")
    return not different


if __name__ == "__main__":
    main()
