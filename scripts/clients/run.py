#!/usr/bin/env python3
"""Check that clients of the APIs of OpenAI, Anthropic and ollama work with `llmcli serve`.

usage: .venv/bin/python scripts/clients/run.py REF [--folder FOLDER] [--only NAME] [-- FLAGS of serve]

The unmodified clients of `packages.py`, libraries and agents in Python and JavaScript, send the
calls of their documentation to a server of this checkout. REF is a model that knows tools. The
clients are installed in FOLDER with the versions of `packages.py` if they are missing: a virtual
environment for each group of Python clients, and a folder for those of npm, which are skipped if
there is no npm. `--only` chooses clients and can be repeated.

A call fails if it raises an error, or if its answer lacks the documented fields; the text of an
answer is not checked. Features that this server lacks (images, audio, files for assistants, stored
responses) must be refused with an explanation, and are counted separately. For each client the
script prints the numbers of passed and of all calls, and the reasons of failures and refusals. It
exits with 1 if a call fails.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

from scripts.clients.packages import CLIENTS, ENVIRONMENTS, NPM, NPM_PACKAGES, Client

ROOT = Path(__file__).resolve().parents[2]
STAMP = "installed.txt"  # in an environment: the packages that it has
# the environment whose packages have versions in scripts/constraints.txt
CONSTRAINED = "python"
# clients send no telemetry, and download no lists of prices
QUIET = {
    "AGNO_TELEMETRY": "false",
    "HAYSTACK_TELEMETRY_ENABLED": "false",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "true",
    "OPENAI_AGENTS_DISABLE_TRACING": "true",
}


def main() -> int:
    """Start the server, run each client, and return 1 if a call or the server failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ref")
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder where the clients are installed; default: a temporary folder",
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=[client.name for client in CLIENTS],
        metavar="NAME",
        help="check only this client; repeatable: %(choices)s",
    )
    parser.add_argument(
        "--minutes", type=float, default=30, help="time limit of a client [%(default)s]"
    )
    args, flags = parser.parse_known_args()
    flags = [word for word in flags if word != "--"]
    clients = [client for client in CLIENTS if not args.only or client.name in args.only]
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).absolute()
        words = [sys.executable, "-m", "llmcli.app", "serve", args.ref, *flags]
        words += ["--port", "0", "--json", "-a", "local"]
        words += ["--files-folder", str(Path(temporary) / "files")]
        programs = {
            name: find_program(name, folder)
            for name in dict.fromkeys(client.environment for client in clients)
        }
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"] + "/v1"
            for client in clients:
                program = programs[client.environment]
                if program is None:
                    print(f"{client.name}: skipped, because there is no npm", flush=True)
                    continue
                failed += run_client(client, program, url, Path(temporary), args.minutes)
            process.send_signal(signal.SIGTERM)
            failed += process.wait(60) != 0
    return int(failed > 0)


def find_program(environment: str, folder: Path) -> Path | None:
    """Return the Python or node of an environment in `folder`. Install what is missing. Return None
    if that needs npm, and there is none.
    """
    place = folder / environment
    if environment == NPM:
        return place / "node_modules/.bin/node" if install_npm(place, NPM_PACKAGES) else None
    constraints = ["-c", str(ROOT / "scripts/constraints.txt")]
    options = constraints if environment == CONSTRAINED else []
    install_python(place, ENVIRONMENTS[environment], options)
    return place / "bin/python"


def install_python(place: Path, packages: Sequence[str], options: Sequence[str] = ()) -> None:
    """Make the folder `place` a virtual environment with these packages, unless it is one."""
    if _has_packages(place, packages):
        return
    venv.create(place, with_pip=True)
    pip = [str(place / "bin/python"), "-m", "pip", "install", "--quiet", *options]
    subprocess.run([*pip, *packages], check=True, cwd=place, stdout=sys.stderr)
    (place / STAMP).write_text("\n".join(packages))


def install_npm(place: Path, packages: Sequence[str]) -> bool:
    """Install packages of npm in the folder `place`, unless it has them. Return whether there is
    npm.
    """
    npm = shutil.which("npm")
    if npm is None or _has_packages(place, packages):
        return npm is not None
    place.mkdir(parents=True, exist_ok=True)
    (place / "package.json").write_text('{"private": true}\n')
    command = [npm, "install", "--no-audit", "--no-fund", "--loglevel=error"]
    subprocess.run([*command, *packages], check=True, cwd=place, stdout=sys.stderr)
    (place / STAMP).write_text("\n".join(packages))
    return True


def _has_packages(place: Path, packages: Sequence[str]) -> bool:
    stamp = place / STAMP
    return stamp.exists() and stamp.read_text().split() == list(packages)


def run_client(client: Client, program: Path, url: str, home: Path, minutes: float) -> int:
    """Run the script with the calls of one client, print the outcomes, and return the number of
    failed calls. `program`: its Python or node; `home`: the home folder of the process.
    """
    environ = {
        **QUIET,
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": "none",
        "LLM_USER_PATH": str(home / "llm"),
        "PYTHONPATH": str(ROOT),
    }
    script = ROOT / "scripts" / "clients" / client.script
    # packages of npm are found from the current folder
    folder = program.parents[2] if client.environment == NPM else home
    why, output = "", ""
    with subprocess.Popen(
        [program, script, url],
        env=environ,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=minutes * 60)
            if process.returncode:
                why = errors.strip()[-500:]
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            why = f"it did not end within {minutes:g} minutes"
    outcomes = [json.loads(line) for line in output.splitlines() if line.startswith('{"call"')]
    if why:
        outcomes.append({"call": "all calls", "passed": False, "why": why})
    n_passed = sum(outcome["passed"] for outcome in outcomes)
    n_refused = sum(outcome["passed"] and outcome.get("refused", False) for outcome in outcomes)
    print(
        f"{client.name}: {n_passed} of {len(outcomes)} passed, {n_refused} of them explained refusals",
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
