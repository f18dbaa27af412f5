"""Functions for scripts that compare programs in pairs of runs."""

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LLMCLI = [str(Path(sys.executable).with_name("llmcli"))]


def document(command: Sequence[str]) -> Any:
    """Run a command and return its JSON document. Raises SystemExit if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout)


def model_path(ref: str) -> str:
    """Return the path of a model file. `ref` is a path, or a name of the catalog, which is pulled
    first.
    """
    return ref if Path(ref).exists() else str(document([*LLMCLI, "pull", ref, "--json"])["path"])


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the low and the high end of the 95% bootstrap interval of the median ratio."""
    rng = random.Random(1)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(4000))
    return medians[100], medians[3899]
