"""Compare the CPU features of this machine, such as AVX2, with those that llama.cpp was built for.

A build of llama.cpp contains kernels only for the features that were enabled when it was compiled.
It makes no use of other features of the processor. If the processor lacks a feature that the build
uses, the process crashes.

Features have ggml's names (ggml_backend_cpu_get_features in ggml/src/ggml-cpu/ggml-cpu.cpp).
"""

import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmcli.runtime.binding import library

CPUINFO_FILE = Path("/proc/cpuinfo")
# ggml's name of a feature -> its names in the Linux kernel and in macOS's sysctl
FEATURE_NAMES: dict[str, tuple[str, ...]] = {
    "SSE3": ("pni", "sse3"),
    "SSSE3": ("ssse3",),
    "AVX": ("avx", "avx1.0"),
    "AVX2": ("avx2",),
    "F16C": ("f16c",),
    "FMA": ("fma",),
    "BMI2": ("bmi2",),
    "AVX_VNNI": ("avx_vnni",),
    "AVX512": ("avx512f",),
    "AVX512_VBMI": ("avx512vbmi",),
    "AVX512_VNNI": ("avx512_vnni",),
    "AVX512_BF16": ("avx512_bf16",),
    "AMX_INT8": ("amx_int8",),
    "NEON": ("asimd", "neon", "advsimd"),
    "FP16_VA": ("asimdhp", "feat_fp16"),
    "DOTPROD": ("asimddp", "feat_dotprod"),
    "MATMUL_INT8": ("i8mm", "feat_i8mm"),
    "SVE": ("sve",),
    "SME": ("sme", "feat_sme"),
}


@dataclass(frozen=True, slots=True)
class CpuFeature:
    """A CPU feature, and where it is present. None: unknown."""

    name: str  # ggml's name, such as AVX2
    in_cpu: bool | None  # whether the processor has it
    in_build: bool | None  # whether llama.cpp was built to use it


def build_features() -> dict[str, frozenset[str]]:
    """Return the features that llama.cpp was built to use, by backend: {"CPU": {"AVX2", …}, …}.
    Raises UserError if llama.cpp cannot be loaded.
    """
    return parse_system_info(library.system_info())


def parse_system_info(text: str) -> dict[str, frozenset[str]]:
    """Return the features in the output of llama_print_system_info, by backend. Features with the
    value 0 are left out. Example of a text: "CPU : SSE3 = 1 | AVX2 = 0 | CUDA : ARCHS = 900 | ".
    """
    by_backend: dict[str, set[str]] = {}
    backend = "CPU"
    for entry in text.split("|"):
        name, colon, tail = entry.partition(" : ")
        if colon:
            backend = name.strip()
        feature, equals, value = (tail if colon else name).partition("=")
        if equals and value.strip() != "0":
            by_backend.setdefault(backend, set()).add(feature.strip())
    return {backend: frozenset(features) for backend, features in by_backend.items()}


def cpu_flags() -> frozenset[str] | None:
    """Return the features of the processor, in lower case, under the names that Linux or macOS
    uses. None: unknown.
    """
    if CPUINFO_FILE.exists():
        lines = re.findall(
            r"^(?:flags|Features)\s*:\s*(.*)$",
            CPUINFO_FILE.read_text(errors="replace"),
            re.MULTILINE,
        )
        return frozenset(lines[0].lower().split()) if lines else None
    return _read_sysctl_flags() if platform.system() == "Darwin" else None


def _read_sysctl_flags() -> frozenset[str] | None:
    """Return the features of the processor that sysctl reports on macOS, in lower case."""
    try:
        process = subprocess.run(
            ["sysctl", "hw.optional", "machdep.cpu"], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    output = process.stdout
    flags = re.findall(r"^hw\.optional\.(?:\w+\.)*(\w+): 1$", output, re.MULTILINE)
    for line in re.findall(r"^machdep\.cpu\.(?:leaf7_)?features: (.*)$", output, re.MULTILINE):
        flags += line.split()
    return frozenset(flag.lower() for flag in flags) or None


def compare_features(
    build: Mapping[str, frozenset[str]] | None, detected_flags: frozenset[str] | None
) -> tuple[CpuFeature, ...]:
    """Return the features of FEATURE_NAMES that the processor has or that llama.cpp's build uses.

    `build`: the features of the build by backend; None: unknown. `detected_flags`: the features of
    the processor under the operating system's names; None: unknown.
    """
    used = None if build is None else build.get("CPU", frozenset())
    features = []
    for name, flags in FEATURE_NAMES.items():
        cpu = None if detected_flags is None else bool(detected_flags & set(flags))
        in_build = None if used is None else name in used
        if cpu or in_build:
            features.append(CpuFeature(name, cpu, in_build))
    return tuple(features)


def unused_features(features: tuple[CpuFeature, ...]) -> tuple[str, ...]:
    """Return the names of the features that the processor has but the build does not use."""
    return tuple(
        feature.name for feature in features if feature.in_cpu and feature.in_build is False
    )


def unsupported_features(features: tuple[CpuFeature, ...]) -> tuple[str, ...]:
    """Return the names of the features that the build uses but the processor does not have."""
    return tuple(
        feature.name for feature in features if feature.in_build and feature.in_cpu is False
    )
