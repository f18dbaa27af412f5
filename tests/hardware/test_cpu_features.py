"""CPU features of the processor and of the build, parsed from texts of the kernel and of
llama.cpp.
"""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from llmcli.hardware import cpu_features

OLD_BUILD = "CPU : SSE3 = 1 | SSSE3 = 1 | AVX = 1 | LLAMAFILE = 1 | OPENMP = 1 | REPACK = 1 | "
FLAGS = "fpu pni ssse3 fma avx f16c avx2 bmi2 avx512f avx512_vnni"


def test_features_of_the_processor_that_the_build_does_not_use_are_found() -> None:
    features = cpu_features.compare_features(
        cpu_features.parse_system_info(OLD_BUILD), frozenset(FLAGS.split())
    )
    assert cpu_features.unused_features(features) == (
        "AVX2",
        "F16C",
        "FMA",
        "BMI2",
        "AVX512",
        "AVX512_VNNI",
    )
    assert cpu_features.unsupported_features(features) == ()
    assert {feature.name for feature in features if feature.in_build} == {"SSE3", "SSSE3", "AVX"}


def test_features_of_the_build_that_the_processor_lacks_are_found() -> None:
    features = cpu_features.compare_features(
        cpu_features.parse_system_info(OLD_BUILD + "AVX2 = 1 | AMX_INT8 = 0 | "),
        frozenset({"pni", "ssse3", "avx"}),
    )
    assert (
        cpu_features.unused_features(features),
        cpu_features.unsupported_features(features),
    ) == (
        (),
        ("AVX2",),
    )


def test_unknown_features_are_neither_unused_nor_unsupported() -> None:
    assert (
        cpu_features.unused_features(cpu_features.compare_features(None, frozenset(FLAGS.split())))
        == ()
    )
    assert (
        cpu_features.unsupported_features(
            cpu_features.compare_features(cpu_features.parse_system_info(OLD_BUILD), None)
        )
        == ()
    )


def test_features_are_parsed_for_each_backend() -> None:
    features = cpu_features.parse_system_info(
        "CUDA : ARCHS = 900 | USE_GRAPHS = 1 | CPU : AVX = 1 | "
    )
    assert features == {"CUDA": frozenset({"ARCHS", "USE_GRAPHS"}), "CPU": frozenset({"AVX"})}
    assert cpu_features.parse_system_info("") == {}


def test_flags_are_read_from_cpuinfo_on_linux(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_flags_are_read_from_sysctl_on_macos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_features, "CPUINFO_FILE", tmp_path / "missing")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    output = SYSCTL

    def run(command: list[str], **options: object) -> "subprocess.CompletedProcess[str]":
        return subprocess.CompletedProcess(command, 0, stdout=output, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    features = cpu_features.compare_features(
        {"CPU": frozenset({"NEON", "MATMUL_INT8"})}, cpu_features.cpu_flags()
    )
    assert (
        cpu_features.unused_features(features),
        cpu_features.unsupported_features(features),
    ) == (
        ("DOTPROD",),
        ("MATMUL_INT8",),
    )
    output = "machdep.cpu.features: FPU SSE3 AVX1.0 FMA\nmachdep.cpu.leaf7_features: BMI2 AVX2\n"
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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has /proc/cpuinfo")
def test_this_processor_supports_all_features_of_this_build() -> None:
    assert (
        cpu_features.unsupported_features(
            cpu_features.compare_features(cpu_features.build_features(), cpu_features.cpu_flags())
        )
        == ()
    )
