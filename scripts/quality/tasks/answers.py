"""Answers of a model file to many prompts, by `llmcli batch` without sampling."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LLMCLI = [sys.executable, "-m", "llmcli.app"]
ROOT = Path(__file__).parents[3]


def answer(
    model: Path, url: str, bodies: Sequence[dict[str, Any]], flags: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return the responses of the endpoint `url` to request bodies, in order. `flags`: more flags
    of `llmcli batch`. Exits with its output if the batch or a line fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        requests, results = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        requests.write_text(
            "".join(
                json.dumps(
                    {
                        "custom_id": str(number),
                        "method": "POST",
                        "url": url,
                        "body": {"temperature": 0, **body},
                    }
                )
                + "\n"
                for number, body in enumerate(bodies)
            )
        )
        command = [*LLMCLI, "batch", str(model), str(requests), "-o", str(results), *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        if not results.exists():
            sys.exit(f"{' '.join(command)}\n{done.stderr[-1000:]}")
        lines = [json.loads(line) for line in results.read_text().splitlines()]
    for line in lines:
        if line.get("error") or line["response"]["status_code"] != 200:
            sys.exit(f"{model}: {json.dumps(line)[:600]}")
    return [line["response"]["body"] for line in lines]
