"""The library of our C functions that is best for the CPU is used, and a reason is given if not."""

import ctypes
import json
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from quant.methods.search import Search
from quant.native import ggml, kernels
from scripts.build import kernels as build_kernels


@pytest.fixture(autouse=True)
def no_cached_libraries() -> Iterator[None]:
    cached = (
        *(kernels.open_kernels, kernels.open_gemm, kernels.open_products, kernels._cpu_level),
        *(ggml.c_function, ggml._encoder),
    )
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.fixture
def installed() -> Path:
    """The folder of the installed libraries."""
    folder = kernels._folder()
    if folder is None or kernels._library_file(kernels.base_name()) is None:
        assert build_kernels.find_compiler() is None, "run scripts/setup: it compiles the C files"
        pytest.skip("there is no C compiler here")
    return folder


def put(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `folder` be the only place of llmcli_kernels."""
    monkeypatch.setattr(kernels, "_folder", lambda: folder)


def test_the_best_library_for_this_cpu_is_used(installed: Path) -> None:
    level, _ = kernels._cpu_level()
    levels = [*kernels.LEVELS, (kernels.base_name(), 0)]
    best = next(
        name for name, minimum in levels if minimum <= level and kernels._library_file(name)
    )
    opened = kernels.open_kernels()
    assert (opened.name, opened.problem) == (best, "")
    assert opened.library is not None
    assert Search().backend_name() == "C"


def test_the_reason_of_a_missing_compiler_is_the_one_of_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = build_kernels.build(tmp_path, None)
    put(tmp_path, monkeypatch)
    opened = kernels.open_kernels()
    assert opened.library is None
    assert opened.problem == f"{kernels.base_name()} was not built: no C compiler was found"
    assert set(failed.values()) == {"no C compiler was found"}
    assert ggml.native_search() is None
    assert not ggml.has_encoders()
    assert Search().backend_name() == "numpy"


def test_without_the_package_everything_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_folder", lambda: None)
    assert kernels.open_kernels().library is None
    assert kernels.open_kernels().problem == "the package llmcli_kernels is not installed"
    assert kernels.open_gemm().library is None
    assert kernels.open_products().library is None


def test_a_lower_level_is_used_if_the_best_was_not_built_and_the_reason_is_kept(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = kernels.open_kernels().name
    if best == kernels.base_name():
        pytest.skip("this CPU has one level")
    folder = tmp_path / "kernels"
    shutil.copytree(installed, folder)
    next(folder.glob(f"{best}.*")).unlink()
    report = {"compiler": "cc 9", "failed": {best: "error: bad value for -march"}}
    (folder / kernels.REPORT_NAME).write_text(json.dumps(report))
    put(folder, monkeypatch)
    kernels.open_kernels.cache_clear()
    opened = kernels.open_kernels()
    assert opened.library is not None
    assert opened.name != best
    assert opened.problem == f"{best} was not built: error: bad value for -march"


def test_a_damaged_library_is_a_reason_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{kernels.base_name()}{build_kernels.suffix()}").write_bytes(b"no library")
    (tmp_path / kernels.REPORT_NAME).write_text("[]")
    put(tmp_path, monkeypatch)
    opened = kernels.open_kernels()
    assert opened.library is None
    assert "does not load" in opened.problem


@pytest.mark.parametrize("machine", ["aarch64", "arm64", "riscv64"])
def test_other_architectures_have_one_library_for_any_cpu(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    """The libraries of x86-64 are no better ones that were not built."""
    library, *others = build_kernels.libraries(machine)
    assert [other.name for other in others] == (
        [] if machine == "riscv64" else [name for name, _ in kernels.ARM_PRODUCTS]
    )
    path = kernels._library_file(kernels.base_name())
    assert path is not None
    shutil.copy(path, tmp_path / (library.name + path.suffix))
    put(tmp_path, monkeypatch)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(kernels, "_cpu_level", lambda: (0, ctypes.CDLL(str(path))))
    opened = kernels.open_kernels()
    assert (opened.name, opened.problem) == (library.name, "")


class Cpu:
    """A base library that reports the instructions of a CPU."""

    def __init__(self, products: int) -> None:
        self._products = products

    def llmcli_cpu_products(self) -> int:
        return self._products


@pytest.mark.parametrize(
    ("machine", "level", "missing", "expected"),
    [
        ("x86_64", 3, [], "products-avx512vnni"),
        ("x86_64", 3, ["products-avx512vnni"], "products-avxvnni"),
        ("x86_64", 2, [], "products-avxvnni"),
        ("AMD64", 1, [], "products-x86-64-v3"),
        ("arm64", 1, [], "products-neon-dotprod"),
        ("x86_64", 0, [], "this processor has no AVX2"),
        ("aarch64", 0, [], "this processor has no NEON with dot products"),
        ("x86_64", 1, ["products-x86-64-v3"], "this wheel was built without it"),
    ],
)
def test_the_best_library_of_products_for_this_cpu_is_used(
    installed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    level: int,
    missing: list[str],
    expected: str,
) -> None:
    base = next(installed.glob(f"{kernels.base_name()}.*"))
    for name, _ in (*kernels.X86_PRODUCTS, *kernels.ARM_PRODUCTS):
        if name not in missing:
            shutil.copy(base, tmp_path / (name + base.suffix))
    put(tmp_path, monkeypatch)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(kernels, "_cpu_level", lambda: (0, Cpu(level)))
    opened = kernels.open_products()
    if opened.library is None:
        assert expected in opened.problem
    else:
        assert opened.name == expected


MISSING = {"f16c": "1 << 29", "movbe": "1 << 22", "lzcnt": "1 << 5"}  # bits of CPUID


@pytest.mark.parametrize("missing", [None, *MISSING])
def test_level_3_needs_all_its_instructions(
    installed: Path, tmp_path: Path, missing: str | None
) -> None:
    """As under a hypervisor that hides some. A cpuid.h of our own hides one."""
    compiler = build_kernels.find_compiler()
    if compiler is None or kernels._cpu_level()[0] < 3:
        pytest.skip("there is no C compiler here, or this CPU has a lower level")
    leaf = "0x80000001" if missing == "lzcnt" else "1"
    (tmp_path / "cpuid.h").write_text(
        "#include_next <cpuid.h>\n"
        "static int hidden(unsigned l, unsigned *a, unsigned *b, unsigned *c, unsigned *d) {\n"
        f"  if (!__get_cpuid(l, a, b, c, d)) return 0;\n"
        f"  if (l == {leaf}) *c &= ~({MISSING.get(missing or '', '0')}u);\n"
        "  return 1;\n}\n#define __get_cpuid hidden\n"
    )
    out = tmp_path / f"level{build_kernels.suffix()}"
    source = build_kernels.ROOT / "quant/native/cpu_level.c"
    command = [*compiler, "-shared", "-fPIC", f"-I{tmp_path}", str(source), "-o", str(out)]
    subprocess.run(command, check=True)
    level = ctypes.CDLL(str(out)).llmcli_cpu_level()
    assert level == (0 if missing else kernels._cpu_level()[0])


def test_encoders_that_write_other_bytes_than_ggml_are_not_used(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where ggml was compiled with contracted multiply-adds."""

    def one_byte_off(rows: int, blocks: int, count: int) -> None:
        encode(rows, blocks, count)
        memory = (ctypes.c_uint8 * 1).from_address(blocks)
        memory[0] ^= 1

    encode = ggml.c_function("encode_q4_K", *ggml._ROW_FUNCTION)
    assert encode is not None
    monkeypatch.setattr(ggml, "c_function", lambda *_: one_byte_off)
    assert ggml._encoder("Q4_K") is None


def test_the_names_of_levels_are_those_of_the_build() -> None:
    built = {
        library.name
        for library in (*build_kernels.X86_64, *build_kernels.GENERIC)
        if library.sources is build_kernels.KERNEL_SOURCES
    }
    names = {name for name, _ in kernels.LEVELS}
    assert built == names | {kernels.X86_BASE, kernels.GENERIC_BASE}
    products = {name for name, _ in kernels.X86_PRODUCTS}
    assert {kernels.GEMM[0], *products} <= {one.name for one in build_kernels.X86_64}
    assert build_kernels.REPORT_NAME == kernels.REPORT_NAME


def test_a_compiler_that_only_offers_to_install_itself_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cc", "gcc", "clang"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert build_kernels.find_compiler() is None
