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
LEVELS = (("kernels-x86-64-v4", 4), ("kernels-x86-64-v3", 3))
X86_BASE, GENERIC_BASE = "kernels-x86-64", "kernels-generic"
GEMM = ("gemm-avx512bf16", 5)
# The libraries of products by architecture, each with the least result of llmcli_cpu_products, best
# first.
X86_PRODUCTS = (
    ("products-avx512vnni", 3),
    ("products-avxvnni", 2),
    ("products-x86-64-v3", 1),
)
ARM_PRODUCTS = (("products-neon-dotprod", 1),)


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
    name, minimum = GEMM
    level, base = _cpu_level()
    if base is not None and level < minimum:
        return Kernels(None, name, "this processor has no AVX512_BF16")
    return _open_first([name], base)


@cache
def open_products() -> Kernels:
    """Open the library of matrix products inside of ggml's CPU backend that is best for this CPU. It
    needs AVX2, or NEON with dot products.
    """
    _, base = _cpu_level()
    suitable = _suitable_products(base)
    if base is not None and not suitable:
        name, needed = (
            (X86_PRODUCTS[-1][0], "AVX2")
            if base_name() == X86_BASE
            else (ARM_PRODUCTS[-1][0], "NEON with dot products")
        )
        return Kernels(None, name, f"this processor has no {needed}")
    return _open_first(suitable, base)


def _open_first(names: list[str], base: ctypes.CDLL | None) -> Kernels:
    """Open the first of some libraries that is there. `base`: the library for any CPU."""
    if base is None:
        return Kernels(None, base_name(), _missing_reason(base_name()))
    problem = ""
    for name in names:
        if path := _library_file(name):
            opened = _open(path)
            if isinstance(opened, ctypes.CDLL):
                return Kernels(opened, name)
        problem = problem or _missing_reason(name)
    return Kernels(None, names[0], problem)


def supports_gemm() -> bool:
    """Return whether this CPU could use the library of matrix products."""
    return _cpu_level()[0] >= GEMM[1]


def supports_products() -> bool:
    """Return whether this CPU could use a library of products inside of ggml's CPU backend."""
    return bool(_suitable_products(_cpu_level()[1]))


def _suitable_products(base: ctypes.CDLL | None) -> list[str]:
    """Return the names of the libraries of products that this CPU can use, best first."""
    level = int(base.llmcli_cpu_products()) if base is not None else 0
    known = X86_PRODUCTS if base_name() == X86_BASE else ARM_PRODUCTS
    return [name for name, minimum in known if minimum <= level]


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
