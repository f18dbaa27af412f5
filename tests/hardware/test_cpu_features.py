"""CPU features of the processor and of the build, parsed from texts of llama.cpp and the kernel."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from llmcli.hardware import cpu_features

OLD = "CPU : SSE3 = 1 | SSSE3 = 1 | AVX = 1 | LLAMAFILE = 1 | OPENMP = 1 | REPACK = 1 | "
FLAGS = "fpu pni ssse3 fma avx f16c avx2 bmi2 avx512f avx512_vnni"


def test_a_build_without_what_the_processor_has_is_found() -> None:
    found = cpu_features.compare_features(
        cpu_features.parse_system_info(OLD), frozenset(FLAGS.split())
    )
    assert cpu_features.unused_features(found) == (
        "AVX2",
        "F16C",
        "FMA",
        "BMI2",
        "AVX512",
        "AVX512_VNNI",
    )
    assert cpu_features.unsupported_features(found) == ()
    assert {one.name for one in found if one.in_build} == {"SSE3", "SSSE3", "AVX"}


def test_a_build_for_another_processor_is_found() -> None:
    found = cpu_features.compare_features(
        cpu_features.parse_system_info(OLD + "AVX2 = 1 | AMX_INT8 = 0 | "),
        frozenset({"pni", "ssse3", "avx"}),
    )
    assert (cpu_features.unused_features(found), cpu_features.unsupported_features(found)) == (
        (),
        ("AVX2",),
    )


def test_unknown_is_neither() -> None:
    assert (
        cpu_features.unused_features(cpu_features.compare_features(None, frozenset(FLAGS.split())))
        == ()
    )
    assert (
        cpu_features.unsupported_features(
            cpu_features.compare_features(cpu_features.parse_system_info(OLD), None)
        )
        == ()
    )


def test_each_backend_has_features_of_its_own() -> None:
    found = cpu_features.parse_system_info("CUDA : ARCHS = 900 | USE_GRAPHS = 1 | CPU : AVX = 1 | ")
    assert found == {"CUDA": frozenset({"ARCHS", "USE_GRAPHS"}), "CPU": frozenset({"AVX"})}
    assert cpu_features.parse_system_info("") == {}


def test_linux_names_them_in_cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(cpu_features, "CPUINFO_FILE", info)
    info.write_text("processor\t: 0\nflags\t\t: fpu AVX2 fma\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert cpu_features.cpu_flags() == {"fpu", "avx2", "fma"}
    info.write_text("Features\t: fp asimd asimddp i8mm\n")
    arm = cpu_features.compare_features({"CPU": frozenset({"NEON"})}, cpu_features.cpu_flags())
    assert cpu_features.unused_features(arm) == ("DOTPROD", "MATMUL_INT8")
    info.write_text("processor\t: 0\n")
    assert cpu_features.cpu_flags() is None


SYSCTL = """hw.optional.neon: 1
hw.optional.arm.FEAT_DotProd: 1
hw.optional.arm.FEAT_I8MM: 0
hw.optional.AdvSIMD: 1
machdep.cpu.brand_string: Apple M9
"""


def test_without_proc_macos_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_features, "CPUINFO_FILE", tmp_path / "none")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    told = SYSCTL

    def run(words: list[str], **more: object) -> "subprocess.CompletedProcess[str]":
        return subprocess.CompletedProcess(words, 0, stdout=told, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    found = cpu_features.compare_features(
        {"CPU": frozenset({"NEON", "MATMUL_INT8"})}, cpu_features.cpu_flags()
    )
    assert (cpu_features.unused_features(found), cpu_features.unsupported_features(found)) == (
        ("DOTPROD",),
        ("MATMUL_INT8",),
    )
    told = "machdep.cpu.features: FPU SSE3 AVX1.0 FMA\nmachdep.cpu.leaf7_features: BMI2 AVX2\n"
    assert cpu_features.unused_features(
        cpu_features.compare_features({"CPU": frozenset({"AVX"})}, cpu_features.cpu_flags())
    ) == (
        "SSE3",
        "AVX2",
        "FMA",
        "BMI2",
    )
    monkeypatch.setattr(platform, "system", lambda: "Plan9")
    assert cpu_features.cpu_flags() is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc/cpuinfo is Linux's")
def test_this_build_needs_nothing_that_this_processor_lacks() -> None:
    assert (
        cpu_features.unsupported_features(
            cpu_features.compare_features(cpu_features.build_features(), cpu_features.cpu_flags())
        )
        == ()
    )
