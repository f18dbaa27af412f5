"""scripts/fuzz/repl.py: a short run of random keys and commands."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_random_keys_leave_a_consistent_state(stories_gguf: Path, home: Path) -> None:
    command = [
        sys.executable,
        ROOT / "scripts" / "fuzz" / "repl.py",
        stories_gguf,
        "--count",
        "5",
        "--seed",
        "3",
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    figures = json.loads(done.stdout)
    assert figures["sequences"] == figures["left"] + figures.get("terminated", 0) == 5
