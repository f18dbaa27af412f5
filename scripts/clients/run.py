#!/usr/bin/env python3
"""Check that the clients of OpenAI, Anthropic and ollama work unmodified, with all documented
calls.

usage: .venv/bin/python scripts/clients/run.py FILE.gguf [--venv FOLDER] [-- FLAGS of serve]

The clients talk to a server of this checkout: openai-python; simonw's `llm` (OpenAI models by base
URL, plain, streamed, with schemas, tools, embeddings, asynchronously); langchain-openai
(ChatOpenAI, OpenAI, OpenAIEmbeddings); anthropic (/v1/messages); ollama (/api). They run in a
virtual environment that is made in FOLDER with scripts/constraints.txt if it is missing. A call
fails if it raises or if its answer lacks the documented shape; the text of an answer is not
checked. Features that this server lacks (images, audio, files, stored responses) must be refused
with an explanation, and are counted separately. The script prints passed and total calls for each
client with all reasons, and exits with 1 if a call fails.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PINS = [
    "llm==0.36",
    "langchain-openai==1.7.3",
    "openai==3.54.0",
    "anthropic==2.12.0",
    "ollama==0.6.3",
]
CLIENTS = {
    "openai-python": "clients/with_openai.py",
    "llm": "clients/with_llm.py",
    "langchain-openai": "clients/with_langchain.py",
    "anthropic": "clients/with_anthropic.py",
    "ollama": "clients/with_ollama.py",
}


def main() -> int:
    """Serve, run each client, count."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ref")
    parser.add_argument(
        "--venv",
        type=Path,
        help="folder where the clients are installed; default: a temporary folder",
    )
    asked, flags = parser.parse_known_args()
    flags = [word for word in flags if word != "--"]
    failed = 0
    with tempfile.TemporaryDirectory() as place:
        python = installed(asked.venv or Path(place) / "venv")
        words = [
            sys.executable,
            "-m",
            "llmcli.app",
            "serve",
            asked.ref,
            "--port",
            "0",
            "--json",
            "-a",
            "local",
            *flags,
        ]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"] + "/v1"
            for name, file in CLIENTS.items():
                failed += tried(name, python, ROOT / "scripts" / file, url, Path(place))
            process.send_signal(signal.SIGTERM)
            failed += process.wait(60) != 0
    return int(failed > 0)


def installed(folder: Path) -> Path:
    """Return a Python with all clients."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    wanted = "import llm, langchain_openai, openai, anthropic, ollama"
    known = subprocess.run([python, "-c", wanted], capture_output=True, check=False)
    if known.returncode:
        pins = ["-c", str(ROOT / "scripts" / "constraints.txt"), *PINS]
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", *pins],
            check=True,
            stderr=subprocess.DEVNULL,
        )
    return python


def tried(name: str, python: Path, file: Path, url: str, place: Path) -> int:
    """Run a client's calls; return the number of failures. The client prints a JSON line per call."""
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(place),
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": "none",
        "LLM_USER_PATH": str(place / "llm"),
        "PYTHONPATH": str(ROOT),
        "LANGSMITH_TRACING": "false",
    }
    done = subprocess.run(
        [python, file, url], env=environ, capture_output=True, text=True, check=False
    )
    calls = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        calls.append(
            {"call": "the whole script", "passed": False, "why": done.stderr.strip()[-500:]}
        )
    good = sum(one["passed"] for one in calls)
    refused = sum(one["passed"] and one.get("refused", False) for one in calls)
    print(
        f"{name}: {good} of {len(calls)} passed, {refused} of them explained refusals", flush=True
    )
    for one in calls:
        if not one["passed"]:
            print(f"  FAILED {one['call']}: {one['why']}")
        elif one.get("refused"):
            print(f"  refused {one['call']}: {one['why']}")
    return len(calls) - good


if __name__ == "__main__":
    raise SystemExit(main())
