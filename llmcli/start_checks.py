"""What must hold before any other module of llmcli is imported: the operating system, and that the
package `quant` is llmcli's.
"""

import importlib
import sys
from pathlib import Path

WINDOWS_ERROR = "llmcli does not run on Windows itself"
WINDOWS_HINT = (
    "use WSL: type `wsl --install` in PowerShell as administrator, and install llmcli inside it"
)


def find_problem() -> tuple[str, str] | None:
    """Return what keeps llmcli from running, as an error message and a hint; None for nothing."""
    if sys.platform in ("win32", "cygwin"):
        return WINDOWS_ERROR, WINDOWS_HINT
    return find_foreign_quant()


def find_foreign_quant() -> tuple[str, str] | None:
    """Return an error message and a hint if Python finds another package `quant` than the one
    beside llmcli, or if other files have replaced it; None if it is llmcli's.
    """
    quant = importlib.import_module("quant")
    beside = Path(__file__).resolve().parents[1] / "quant" / "__init__.py"
    found = Path(quant.__file__).resolve() if quant.__file__ else None
    if found == beside and getattr(quant, "BELONGS_TO", "") == "llmcli":
        return None
    place = found or ", ".join(map(str, quant.__path__))
    if found == beside:
        return (
            f"another program has replaced llmcli's package `quant` ({beside.parent})",
            "install llmcli into an environment of its own, as pipx and uv tool do",
        )
    return (
        f"Python finds another package `quant` than llmcli's: {place}",
        f"start llmcli from another folder, or take that one off PYTHONPATH: {beside.parent} is "
        "llmcli's",
    )
