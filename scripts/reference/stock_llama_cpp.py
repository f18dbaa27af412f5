#!/usr/bin/env python3
"""Check that GGUF files work in an unmodified llama-cli and llama-server.

usage: .venv/bin/python scripts/reference/stock_llama_cpp.py FILE.gguf ... --tools DIR
       [--predict 24] [-t 2]

llama-cli must answer one prompt and exit with 0. llama-server must listen on loopback, report that
it is healthy, complete the same prompt greedily, and exit with 0 at SIGINT. Neither may warn about
a tensor. The script prints a line per file and exits with 1 if a file fails.
"""

import argparse
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import IO

PROMPT = "The city lies on the river and"
TIMEOUT_SECONDS = 120.0  # seconds to load a model, and for an answer
TENSOR_WARNINGS = re.compile(
    r"^.*(?:unused tensor|missing tensor|wrong number of tensors|unknown type|unknown tensor|invalid data|NaN).*$",
    re.MULTILINE | re.IGNORECASE,
)


class Unfit(Exception):
    """A file does not work in llama.cpp; the message is the reason."""


def main() -> int:
    """Parse the flags, check every file and print; return 1 if a file fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument(
        "--tools", type=Path, required=True, help="folder with llama-cli and llama-server"
    )
    parser.add_argument("--predict", type=int, default=24, help="tokens of an answer")
    parser.add_argument("-t", "--threads", type=int, default=2)
    args = parser.parse_args()
    failed = 0
    for file in args.files:
        try:
            answer_text = answers(args, file)
        except Unfit as problem:
            failed += 1
            print(f"FAILED {file.name}: {problem}", flush=True)
        else:
            print(f"ok     {file.name}: {answer_text}", flush=True)
    print(f"{len(args.files) - failed} of {len(args.files)} files load and answer")
    return 1 if failed else 0


def answers(args: argparse.Namespace, file: Path) -> str:
    """Return the answers of both tools as one line of text. `args` has `tools` (their folder),
    `predict` (tokens) and `threads`. Raises Unfit if a tool fails.
    """
    return f"llama-cli {cli(args, file)!r}, llama-server {server(args, file)!r}"


def common(args: argparse.Namespace, tool: str, file: Path) -> list[str]:
    """Return the part of the command line that both tools share. With -lv 3 they print warnings."""
    threads, predict = str(args.threads), str(args.predict)
    return [
        str(args.tools / tool),
        "-m",
        str(file),
        "-c",
        "512",
        "-n",
        predict,
        "--temp",
        "0",
        "-t",
        threads,
        "-lv",
        "3",
    ]


def cli(args: argparse.Namespace, file: Path) -> str:
    """Run llama-cli on PROMPT; return the beginning of its answer. Raises Unfit if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "answer.txt"
        command = [
            *common(args, "llama-cli", file),
            "-p",
            PROMPT,
            "--single-turn",
            "--output",
            str(out),
        ]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Unfit(f"llama-cli did not end within {TIMEOUT_SECONDS:.0f} s") from None
        output = done.stdout + done.stderr
        if done.returncode:
            raise Unfit(f"llama-cli: exit {done.returncode}: {output[-400:]}")
        check_warnings(output, "llama-cli")
        _, _, answer = out.read_text(errors="replace").partition("Assistant:\n")
    return check_answer(answer, "llama-cli")


def server(args: argparse.Namespace, file: Path) -> str:
    """Run llama-server; return the beginning of its completion of PROMPT. Raises Unfit if it
    fails.
    """
    port = free_port()
    command = [*common(args, "llama-server", file), "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            wait_until_healthy(child, f"http://127.0.0.1:{port}/health", log)
            body = {"prompt": PROMPT, "n_predict": args.predict, "temperature": 0}
            response = fetch(f"http://127.0.0.1:{port}/completion", json.dumps(body).encode())
            child.send_signal(signal.SIGINT)
            code = child.wait(TIMEOUT_SECONDS)
        except (OSError, ValueError, subprocess.TimeoutExpired) as problem:
            raise Unfit(f"llama-server: {problem}: {read_log(log)[-400:]}") from None
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        if code:
            raise Unfit(f"llama-server: exit {code}: {read_log(log)[-400:]}")
        check_warnings(read_log(log), "llama-server")
    return check_answer(str(json.loads(response)["content"]), "llama-server")


def wait_until_healthy(child: "subprocess.Popen[bytes]", url: str, log: IO[str]) -> None:
    """Wait until the server reports that it is healthy. Raises Unfit if it ends before, or after
    TIMEOUT_SECONDS.
    """
    end = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < end:
        if child.poll() is not None:
            raise Unfit(f"llama-server: exit {child.returncode}: {read_log(log)[-400:]}")
        try:
            fetch(url)
        except OSError:  # not yet listening, or 503 while loading
            time.sleep(0.1)
        else:
            return
    raise Unfit(f"llama-server was not ready within {TIMEOUT_SECONDS:.0f} s")


def fetch(url: str, body: bytes | None = None) -> bytes:
    """Send a GET, or a POST if there is a JSON body, without a proxy; return the answer's body."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
        return bytes(answer.read())


def read_log(log: IO[str]) -> str:
    """Return the whole text of a log file."""
    log.seek(0)
    return log.read()


def check_warnings(output: str, tool: str) -> None:
    """Raise Unfit if a tool's output contains a warning about a tensor."""
    warnings = TENSOR_WARNINGS.findall(output)
    if warnings:
        raise Unfit(f"{tool} warns: {warnings[0].strip()}")


def check_answer(text: str, tool: str) -> str:
    """Return the first 60 characters of an answer. Raises Unfit if the answer is blank."""
    if not text.strip():
        raise Unfit(f"{tool} answered nothing")
    return " ".join(text.split())[:60]


def free_port() -> int:
    """Return a TCP port that is free on the loopback interface."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
