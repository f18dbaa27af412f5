"""scripts/fuzz/files.py: in a short run, every mutated file is read correctly or refused."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited through /proc and RLIMIT_AS")
def test_mutated_files_are_read_correctly_or_refused() -> None:
    pytest.importorskip(
        "safetensors", reason="the safetensors library is not installed: nothing to compare with"
    )
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "fuzz" / "files.py", "--count", "120", "--seed", "7"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "refused" in done.stdout
    assert " read\n" in done.stdout
