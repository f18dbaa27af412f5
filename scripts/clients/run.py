#!/usr/bin/env python3
"""Check that clients of the APIs of OpenAI, Anthropic and ollama work with `llmcli serve`.

usage: .venv/bin/python scripts/clients/run.py REF... [--folder FOLDER] [--only NAME] [-- FLAGS of serve]

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

With several REFs, one server offers them all, and each client runs once for each model, all at the
same time. Answers are reproducible. The script then also fails if an answer names
another model than the one asked, or if one of `--texts` answers of each client differs from the
answer that the model gives to the same request when it is served alone.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from scripts.clients import recording_proxy
from scripts.clients.packages import CLIENTS, ENVIRONMENTS, NPM, NPM_PACKAGES, Client
from scripts.clients.recording_proxy import Exchange
from scripts.load.server_process import wait_or_kill

ROOT = Path(__file__).resolve().parents[2]
END_SECONDS = 60.0  # how long a server may take to end
STAMP = "installed.txt"  # in an environment: the packages that it has
# the environment whose packages have versions in scripts/constraints.txt
CONSTRAINED = "python"
# With these, an answer depends on its request alone.
REPRODUCIBLE = ("--reproducible", "--seed", "1", "--predict", "200")
# clients send no telemetry, and download no lists of prices
QUIET = {
    "AGNO_TELEMETRY": "false",
    "HAYSTACK_TELEMETRY_ENABLED": "false",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "true",
    "OPENAI_AGENTS_DISABLE_TRACING": "true",
}


def main() -> int:
    """Run each client with each model, and return 1 if a call or a server failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("refs", nargs="+", metavar="REF")
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
    parser.add_argument(
        "--texts",
        type=int,
        default=3,
        help="with several models: answers of each client that are compared with those of the model"
        " alone [%(default)s]",
    )
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    args, flags = parser.parse_args(words[:end]), words[end + 1 :]
    chosen = [client for client in CLIENTS if not args.only or client.name in args.only]
    with tempfile.TemporaryDirectory() as temporary:
        folder, home = (args.folder or Path(temporary)).absolute(), Path(temporary)
        programs = {
            name: find_program(name, folder)
            for name in dict.fromkeys(client.environment for client in chosen)
        }
        clients = []
        for client in chosen:
            if (program := programs[client.environment]) is None:
                print(f"{client.name}: skipped, because there is no npm", flush=True)
            else:
                clients.append((client, program))
        if len(args.refs) == 1:
            failed = check_model(args.refs[0], flags, clients, home, args.minutes)
        else:
            failed = check_models(args.refs, flags, clients, home, args.minutes, args.texts)
    return int(failed > 0)


def check_model(
    ref: str,
    flags: Sequence[str],
    clients: Sequence[tuple[Client, Path]],
    home: Path,
    minutes: float,
) -> int:
    """Run each client with a server of one model, and return the number of failed calls."""
    failed = 0
    own = ("-a", "local", "--files-folder", str(home / "files"))
    with serve(ref, *flags, *own) as url:
        for client, program in clients:
            outcomes = run_client(client, program, url + "/v1", ["local"], home, minutes)
            failed += report(client.name, outcomes)
    return failed


def check_models(
    refs: Sequence[str],
    flags: Sequence[str],
    clients: Sequence[tuple[Client, Path]],
    home: Path,
    minutes: float,
    n_texts: int,
) -> int:
    """Run each client with each model of one server at the same time, compare `n_texts` answers of
    each with those of the model alone, and return the number of failures.
    """
    flags = (*REPRODUCIBLE, *flags)
    failed = n_answers = 0
    seconds = 0.0
    texts: dict[str, list[Exchange]] = {}
    with serve(*refs, *flags, "--files-folder", str(home / "files")) as url:
        models = list_models(url, refs)
        for client, program in clients:
            with ExitStack() as stack:
                watched = [stack.enter_context(recording_proxy.watch(url + "/v1")) for _ in models]
                pool = stack.enter_context(ThreadPoolExecutor(len(models)))
                runs = []
                for model, (own_url, _) in zip(models, watched, strict=True):
                    names = [model, *(other for other in models if other != model)]
                    own_home = home / model.replace(":", "-").replace("/", "-")
                    own_home.mkdir(exist_ok=True)
                    runs.append(
                        pool.submit(run_client, client, program, own_url, names, own_home, minutes)
                    )
                for model, (_, exchanges), running in zip(models, watched, runs, strict=True):
                    outcomes = running.result()
                    outcomes += [
                        {"call": "the model of each answer", "passed": False, "why": why}
                        for why in recording_proxy.find_wrong_models(exchanges, model)
                    ]
                    failed += report(f"{client.name} with {model}", outcomes)
                    n_answers += sum(bool(exchange.named_models) for exchange in exchanges)
                    texts.setdefault(model, []).extend(
                        recording_proxy.choose_texts(exchanges, n_texts)
                    )
            seconds += recording_proxy.overlap_seconds(watched[0][1], watched[1][1])
    print(
        f"{n_answers} answers name their model; for {seconds:.0f} s, {models[0]} and {models[1]} "
        "answered at once",
        flush=True,
    )
    return failed + compare_texts(refs, models, flags, texts)


def compare_texts(
    refs: Sequence[str],
    models: Sequence[str],
    flags: Sequence[str],
    texts: dict[str, list[Exchange]],
) -> int:
    """Ask each model alone for all `texts`, print how many are as they were, and return the number
    of those that are not. `texts`: the exchanges of each model.
    """
    alone: dict[str, dict[tuple[str, bytes], str]] = {}
    for ref, model in zip(refs, models, strict=True):
        with serve(ref, *flags) as url:
            alone[model] = {
                (exchange.path, exchange.request): recording_proxy.ask(url, exchange).text
                for exchanges in texts.values()
                for exchange in exchanges
            }
    failed = 0
    for model, exchanges in texts.items():
        wrong = [one for one in exchanges if one.text != alone[model][one.path, one.request]]
        n_own = sum(
            all(
                one.text != alone[other][one.path, one.request]
                for other in models
                if other != model
            )
            for one in exchanges
        )
        print(
            f"{model}: {len(exchanges) - len(wrong)} of {len(exchanges)} answers are those of the "
            f"model alone, and {n_own} those of no other model",
            flush=True,
        )
        for one in wrong:
            print(
                f"  FAILED {one.path}: {one.text[:200]!r}, "
                f"not {alone[model][one.path, one.request][:200]!r}"
            )
        failed += len(wrong) + (n_own == 0)
    return failed


@contextmanager
def serve(*words: str) -> Iterator[str]:
    """Run a server, and yield its URL. Raises CalledProcessError if it does not end well, and
    TimeoutExpired if it does not end at all.
    """
    command = [sys.executable, "-m", "llmcli.app", "serve", *words, "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.send_signal(signal.SIGTERM)
            code = wait_or_kill(process)
    if code:
        raise subprocess.CalledProcessError(code, command)


def list_models(url: str, refs: Sequence[str]) -> list[str]:
    """Return the names of a server's models, in the order of `refs`. Raises SystemExit if these are
    no names.
    """
    with urllib.request.urlopen(url + "/v1/models") as answer:
        names = [model["id"] for model in json.load(answer)["data"]]
    if set(names) != set(refs):
        raise SystemExit(f"use the names of `llmcli list`: {', '.join(names)}")
    return list(refs)


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


def run_client(
    client: Client, program: Path, url: str, models: Sequence[str], home: Path, minutes: float
) -> list[dict[str, Any]]:
    """Run the script with the calls of one client, and return their outcomes. `program`: its Python
    or node; `models`: the model to use, and the other ones of the server; `home`: the home folder
    of the process.
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
        [program, script, url, *models],
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
    return outcomes


def report(name: str, outcomes: Sequence[dict[str, Any]]) -> int:
    """Print the outcomes of a client's calls, and return the number of failed ones."""
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
