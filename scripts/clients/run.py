#!/usr/bin/env python3
"""Check that clients of the APIs of OpenAI, Anthropic and ollama work with `llmcli serve`.

usage: .venv/bin/python scripts/clients/run.py FILE.gguf [--venv FOLDER] [-- FLAGS of serve]

The unmodified clients send their documented calls to a server of this checkout: openai-python;
simonw's `llm` (OpenAI models by base URL); langchain-openai (ChatOpenAI, OpenAI, OpenAIEmbeddings);
anthropic (/v1/messages); ollama (/api). They run in a virtual environment in FOLDER, which is made
with the versions of scripts/constraints.txt if it is missing. A call fails if it raises an error or
if its answer lacks the documented fields; the text of an answer is not checked. Features that this
server lacks (images, audio, files for assistants, stored responses) must be refused with an
explanation, and are counted separately. For each client the script prints the numbers of passed and
of all calls, and the reasons of failures and refusals. It exits with 1 if a call fails.
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
    """Start the server, run each client, and return 1 if a call or the server failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ref")
    parser.add_argument(
        "--venv",
        type=Path,
        help="folder where the clients are installed; default: a temporary folder",
    )
    args, flags = parser.parse_known_args()
    flags = [word for word in flags if word != "--"]
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        python = client_python(args.venv or Path(temporary) / "venv")
        words = [
            sys.executable,
            "-m",
            "llmcli.app",
            "serve",
            args.ref,
            "--port",
            "0",
            "--json",
            "-a",
            "local",
            "--files-folder",
            str(Path(temporary) / "files"),
            *flags,
        ]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"] + "/v1"
            for name, file in CLIENTS.items():
                failed += run_client(name, python, ROOT / "scripts" / file, url, Path(temporary))
            process.send_signal(signal.SIGTERM)
            failed += process.wait(60) != 0
    return int(failed > 0)


def client_python(folder: Path) -> Path:
    """Return the Python of the virtual environment in `folder`. Create the environment and install
    the clients if they are missing.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    imports = "import llm, langchain_openai, openai, anthropic, ollama"
    check = subprocess.run([python, "-c", imports], capture_output=True, check=False)
    if check.returncode:
        pins = ["-c", str(ROOT / "scripts" / "constraints.txt"), *PINS]
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", *pins],
            check=True,
            stderr=subprocess.DEVNULL,
        )
    return python


def run_client(name: str, python: Path, file: Path, url: str, home: Path) -> int:
    """Run the script `file` with the calls of one client, print the outcomes, and return the number
    of failed calls. `home`: the home folder of the process.
    """
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": "none",
        "LLM_USER_PATH": str(home / "llm"),
        "PYTHONPATH": str(ROOT),
        "LANGSMITH_TRACING": "false",
    }
    done = subprocess.run(
        [python, file, url], env=environ, capture_output=True, text=True, check=False
    )
    outcomes = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        outcomes.append({"call": "all calls", "passed": False, "why": done.stderr.strip()[-500:]})
    n_passed = sum(outcome["passed"] for outcome in outcomes)
    n_refused = sum(outcome["passed"] and outcome.get("refused", False) for outcome in outcomes)
    print(
        f"{name}: {n_passed} of {len(outcomes)} passed, {n_refused} of them explained refusals",
        flush=True,
    )
    for outcome in outcomes:
        if not outcome["passed"]:
            print(f"  FAILED {outcome['call']}: {outcome['why']}")
        elif outcome.get("refused"):
            print(f"  refused {outcome['call']}: {outcome['why']}")
    return len(outcomes) - n_passed


if __name__ == "__main__":
    raise SystemExit(main())
