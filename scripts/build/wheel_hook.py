"""The hook of the build back end: it adds the compiled C files to llmcli's wheel.

The libraries are in the package llmcli_kernels, also if the checkout itself is installed (editable).
A machine without a C compiler gets a wheel without them, and `llmcli doctor` says so.
"""

import platform
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))
import kernels

PACKAGE = "llmcli_kernels"


class CompiledKernels(BuildHookInterface[Any]):
    """Compiles the C files before the wheel is packed, and removes them afterwards."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the libraries and add them to the wheel."""
        self.folder = Path(tempfile.mkdtemp(prefix="llmcli-kernels-"))
        compiler = kernels.find_compiler()
        failed = kernels.build(self.folder, compiler)
        for name, reason in failed.items():
            self.app.display_warning(f"{name} was not built: {reason}")
        files = {str(path): f"{PACKAGE}/{path.name}" for path in kernels.built_files(self.folder)}
        key = "force_include_editable" if version == "editable" else "force_include"
        build_data[key] = {**build_data.get(key, {}), **files}
        if any(path.endswith(kernels.suffix()) for path in files):
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the libraries, which are in the wheel now."""
        shutil.rmtree(self.folder, ignore_errors=True)


def platform_tag() -> str:
    """Return the platform part of the wheel's tag. Python for macOS may be built for two
    architectures, but the libraries are for this machine's.
    """
    tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    return tag.replace("universal2", platform.machine())
