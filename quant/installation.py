"""How this copy of llmcli was installed, and the commands that complete it.

A checkout of the source has scripts/setup. A copy that was installed by pip, pipx or uv has not, and
hints name a command of that installer.
"""

import importlib.util
import re
import shlex
import sys
from pathlib import Path

SETUP_SCRIPT = "scripts/setup"
LLAMA_PACKAGE = "llama-cpp-python"


def is_checkout() -> bool:
    """Return whether this code runs from a checkout of the source, which has scripts/setup."""
    return (Path(__file__).parents[1] / SETUP_SCRIPT).is_file()


def installer() -> str:
    """Return the command that installs packages into this Python's environment. uv makes
    environments without pip.
    """
    python = shlex.quote(sys.executable)
    if importlib.util.find_spec("pip"):
        return f"{python} -m pip install"
    return f"uv pip install --python {python}"


def llama_requirement() -> str:
    """Return the requirement of llmcli for llama-cpp-python, such as "llama-cpp-python==0.3.36"."""
    # imported here because it takes time, and is needed for an error only
    from importlib.metadata import PackageNotFoundError, requires

    try:
        requirements = requires("llmcli") or []
    except PackageNotFoundError:
        requirements = []
    name = re.compile(rf"{LLAMA_PACKAGE}(?![\w.-])", re.IGNORECASE)
    return next((text for text in requirements if name.match(text)), LLAMA_PACKAGE)


def install_llama_command(cmake_args: str = "", *, header: Path | None = None) -> str:
    """Return the shell command that builds and installs llama.cpp for this machine, with these
    options for CMake. `header`: a file to include in every source. scripts/setup has its own
    options, with RPC and tile-config.h, and needs neither.
    """
    if is_checkout():
        return f"{SETUP_SCRIPT} --again"
    variables = f"CMAKE_ARGS={shlex.quote(cmake_args)} " if cmake_args else ""
    if header is not None:
        flags = shlex.quote(f"-include {shlex.quote(str(header))}")
        variables += f"CFLAGS={flags} CXXFLAGS={flags} "
    options = f"--force-reinstall --no-cache-dir --no-deps --no-binary {LLAMA_PACKAGE}"
    return f"{variables}{installer()} {options} {shlex.quote(llama_requirement())}"


def install_kernels_advice() -> str:
    """Return what to do to get the compiled C functions of llmcli, in words."""
    again = f"run {SETUP_SCRIPT}" if is_checkout() else "install llmcli again from its source"
    compilers = "Debian, Ubuntu: sudo apt install gcc; Fedora: sudo dnf install gcc"
    return f"install a C compiler ({compilers}; macOS: xcode-select --install) and {again}"
