"""What this processor can do, in ggml's words, against what the llama.cpp that is installed was
built for.

A build has kernels for the features that its compiler was told of (ggml_backend_cpu_get_features of
ggml/src/ggml-cpu/ggml-cpu.cpp); what a processor has besides lies idle, and what it lacks ends the
process.
"""

import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmcli.runtime.binding import library

INFO = Path("/proc/cpuinfo")
# ggml's word -> the kernel's (Linux), macOS's last words of sysctl.
WORDS: dict[str, tuple[str, ...]] = {
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
class Feature:
    """One feature: whether the processor has it, and whether the build uses it. None: not known."""

    name: str
    cpu: bool | None
    build: bool | None


def built() -> dict[str, frozenset[str]]:
    """Features of each backend of the build: {"CPU": {"AVX2", …}}. Raises UserError where it does
    not load.
    """
    return parse(library.lib().llama_print_system_info().decode("utf-8", "replace"))


def parse(text: str) -> dict[str, frozenset[str]]:
    """llama_print_system_info's line, "CPU : SSE3 = 1 | AVX2 = 0 | CUDA : ARCHS = 900 | "."""
    found: dict[str, set[str]] = {}
    backend = "CPU"
    for part in text.split("|"):
        name, colon, rest = part.partition(" : ")
        if colon:
            backend = name.strip()
        feature, equals, value = (rest if colon else name).partition("=")
        if equals and value.strip() != "0":
            found.setdefault(backend, set()).add(feature.strip())
    return {backend: frozenset(features) for backend, features in found.items()}


def words() -> frozenset[str] | None:
    """The processor's features in the operating system's words; None where it does not tell."""
    if INFO.exists():
        lines = re.findall(
            r"^(?:flags|Features)\s*:\s*(.*)$", INFO.read_text(errors="replace"), re.MULTILINE
        )
        return frozenset(lines[0].lower().split()) if lines else None
    return _sysctl() if platform.system() == "Darwin" else None


def _sysctl() -> frozenset[str] | None:
    try:
        done = subprocess.run(
            ["sysctl", "hw.optional", "machdep.cpu"], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    flags = re.findall(r"^hw\.optional\.(?:\w+\.)*(\w+): 1$", done.stdout, re.MULTILINE)
    for line in re.findall(r"^machdep\.cpu\.(?:leaf7_)?features: (.*)$", done.stdout, re.MULTILINE):
        flags += line.split()
    return frozenset(flag.lower() for flag in flags) or None


def compare(
    build: Mapping[str, frozenset[str]] | None, told: frozenset[str] | None
) -> tuple[Feature, ...]:
    """Every feature that the processor has or the build uses; of those that ggml has a word for."""
    used = None if build is None else build.get("CPU", frozenset())
    found = []
    for name, spelled in WORDS.items():
        cpu = None if told is None else bool(told & set(spelled))
        mine = None if used is None else name in used
        if cpu or mine:
            found.append(Feature(name, cpu, mine))
    return tuple(found)


def idle(features: tuple[Feature, ...]) -> tuple[str, ...]:
    """What the processor has and the build does not use."""
    return tuple(one.name for one in features if one.cpu and one.build is False)


def missing(features: tuple[Feature, ...]) -> tuple[str, ...]:
    """What the build uses and the processor has not: such an instruction ends the process."""
    return tuple(one.name for one in features if one.build and one.cpu is False)
