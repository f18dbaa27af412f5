"""Whether llama.cpp's kernels for AMX work. GCC before 14, in most versions, compiles them such that
the first one ends in an illegal instruction (bug 114098).

scripts/setup builds llama.cpp with tile-config.h, which mends them and marks the library. Other
builds, as by pip, are recognized by their compiler, which compilers write into what they compile.
Models are then loaded without buffers for AMX.
"""

import functools
import re
from pathlib import Path

from llmcli.runtime.binding.library import ggml, library_files
from llmcli.runtime.binding.placement import devices
from quant import installation

MARK = "llmcli_tile_config"  # exported by a build with tile-config.h
COMPILER_PATTERN = re.compile(rb"GCC: \([^)\0]*\) (\d+)\.(\d+)")
# the first version of each series that is right; older series are wrong
FIRST_RIGHT_VERSIONS = {12: 4, 13: 3}
HEADER_NAME = "tile-config.h"


@functools.cache
def is_build_faulty() -> bool:
    """Return whether llama.cpp would use AMX on this machine, and would crash. Models must then be
    loaded without extra buffers.
    """
    if not devices.repacks_for_amx() or hasattr(ggml(), MARK):
        return False
    return any(
        is_wrong_compiler(version)
        for path, _ in library_files()
        if path.name.startswith("libggml-cpu")
        for version in gcc_versions(path.read_bytes())
    )


def repacks_weights() -> bool:
    """Return whether llama.cpp repacks quantized weights for AMX when llmcli loads a model."""
    return devices.repacks_for_amx() and not is_build_faulty()


def gcc_versions(library: bytes) -> set[tuple[int, int]]:
    """Return the versions of GCC that compiled parts of a library, given the bytes of its file."""
    return {(int(major), int(minor)) for major, minor in COMPILER_PATTERN.findall(library)}


def is_wrong_compiler(version: tuple[int, int]) -> bool:
    """Return whether a version of GCC compiles the kernels wrongly."""
    major, minor = version
    return major < 14 and minor < FIRST_RIGHT_VERSIONS.get(major, 1 << 30)


def repair_command() -> str:
    """Return the shell command that builds llama.cpp with working kernels for AMX."""
    return installation.install_llama_command(
        "-DGGML_RPC=on", header=Path(__file__).with_name(HEADER_NAME)
    )
