"""Our compiled C functions: which libraries of llmcli_kernels this CPU can use, and why some are
missing.

llmcli's wheel contains them for several levels of CPU, if a C compiler was there when it was built
(scripts/build/wheel_hook.py). Without them, numpy and ggml do the same work more slowly.
"""

import ctypes
import importlib.util
import json
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = "llmcli_kernels"
REPORT_NAME = "built.json"  # which libraries could not be built, and why
# The libraries for some CPUs of their architecture, best first, each with the least result of
# llmcli_cpu_level (cpu_level.c).
AVX512_LEVEL = 4
LEVELS = (("kernels-x86-64-v4", AVX512_LEVEL), ("kernels-x86-64-v3", 3))
X86_BASE, GENERIC_BASE = "kernels-x86-64", "kernels-generic"
GEMM = ("gemm-avx512bf16", 5)
PRODUCTS = ("products-x86-64-v3", 3)


@dataclass(frozen=True, slots=True)
class Kernels:
    """A library of C functions. `library` is None if there is none to use; then `problem` says why,
    in the words of an error message. `name` is the best library for this CPU.
    """

    library: ctypes.CDLL | None
    name: str
    problem: str = ""


@cache
def open_kernels() -> Kernels:
    """Open the library of functions for quantization and for rows of logits that is best for this
    CPU.
    """
    level, base = _cpu_level()
    if base is None:
        return Kernels(None, base_name(), _missing_reason(base_name()))
    suitable = [*(name for name, minimum in LEVELS if minimum <= level), base_name()]
    for name in suitable:
        if path := _library_file(name):
            opened = base if name == base_name() else _open(path)
            if isinstance(opened, ctypes.CDLL):
                problem = "" if name == suitable[0] else _missing_reason(suitable[0])
                return Kernels(opened, name, problem)
    raise AssertionError(suitable)  # the base library was opened above


@cache
def open_gemm() -> Kernels:
    """Open the library of matrix products in bfloat16, which needs AVX512_BF16 and OpenMP."""
    return _open_for_level(*GEMM, "AVX512_BF16")


@cache
def open_products() -> Kernels:
    """Open the library of matrix products inside of ggml's CPU backend, which needs AVX2."""
    return _open_for_level(*PRODUCTS, "AVX2")


def _open_for_level(name: str, minimum: int, feature: str) -> Kernels:
    """Open a library without alternatives. `minimum`: the least level of CPU that can use it, the
    one that has `feature`.
    """
    level, base = _cpu_level()
    if base is None:
        return Kernels(None, name, _missing_reason(base_name()))
    if level < minimum:
        return Kernels(None, name, f"this processor has no {feature}")
    path = _library_file(name)
    if path is None:
        return Kernels(None, name, _missing_reason(name))
    opened = _open(path)
    if isinstance(opened, ctypes.CDLL):
        return Kernels(opened, name)
    return Kernels(None, name, f"{name} does not load: {opened}")


def supports_gemm() -> bool:
    """Return whether this CPU could use the library of matrix products."""
    return _cpu_level()[0] >= GEMM[1]


def supports_products() -> bool:
    """Return whether this CPU could use the library of products inside of ggml's CPU backend."""
    return _cpu_level()[0] >= PRODUCTS[1]


def has_avx512() -> bool:
    """Return whether this CPU has AVX-512."""
    return _cpu_level()[0] >= AVX512_LEVEL


def base_name() -> str:
    """Return the name of the library for any CPU of this architecture, as scripts/build/kernels.py
    chooses it.
    """
    return X86_BASE if platform.machine().lower() in ("x86_64", "amd64") else GENERIC_BASE


@cache
def _cpu_level() -> tuple[int, ctypes.CDLL | None]:
    """Return the level of this CPU and the library for any CPU, or 0 and None without the library."""
    path = _library_file(base_name())
    opened = _open(path) if path else None
    if not isinstance(opened, ctypes.CDLL):
        return 0, None
    return int(opened.llmcli_cpu_level()), opened


def _open(path: Path) -> ctypes.CDLL | str:
    """Open a library. Return the reason as a text if it does not load."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        return str(error)


def _folder() -> Path | None:
    """Return the folder of the libraries, or None if it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    return Path(spec.origin).parent if spec and spec.origin else None


def _library_file(name: str) -> Path | None:
    """Return the path of a library, or None if it is not there."""
    folder = _folder()
    if folder is None:
        return None
    paths = [folder / f"{name}{suffix}" for suffix in (".so", ".dylib")]
    return next((path for path in paths if path.is_file()), None)


def _missing_reason(name: str) -> str:
    """Return why a library cannot be used, from the report of the build."""
    folder = _folder()
    if folder is None:
        return f"the package {PACKAGE} is not installed"
    if path := _library_file(name):
        return f"{name} does not load: {_open(path)}"
    try:
        report = json.loads((folder / REPORT_NAME).read_text())
    except (OSError, ValueError):
        report = {}
    failed = report.get("failed", {}) if isinstance(report, dict) else {}
    reason = failed.get(name) or "this wheel was built without it"
    return f"{name} was not built: {reason}"
