#!/usr/bin/env python3
"""Check that files run in an unmodified llama.cpp: an answer by llama-cli and by llama-server.

usage: .venv/bin/python scripts/reference/stock_llama_cpp.py FILE.gguf ... --tools DIR
       [--predict 24] [-t 2]

llama-cli must answer one prompt and exit with 0. llama-server must listen on loopback, report
healthy, complete the same prompt greedily, and exit with 0 at SIGINT. Neither may warn about a
tensor. The script prints a line per file and exits with 1 if one fails.
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
WAIT = 120.0  # seconds to load a model, and for an answer
TENSORS = re.compile(
    r"^.*(?:unused tensor|missing tensor|wrong number of tensors|unknown type|unknown tensor|invalid data|NaN).*$",
    re.MULTILINE | re.IGNORECASE,
)


class Unfit(Exception):
    """The reason why a file failed."""


def main() -> int:
    """Check every file; return 1 if one fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument(
        "--tools", type=Path, required=True, help="folder with llama-cli and llama-server"
    )
    parser.add_argument("--predict", type=int, default=24, help="tokens of an answer")
    parser.add_argument("-t", "--threads", type=int, default=2)
    asked = parser.parse_args()
    failed = 0
    for file in asked.files:
        try:
            said = answers(asked, file)
        except Unfit as problem:
            failed += 1
            print(f"FAILED {file.name}: {problem}", flush=True)
        else:
            print(f"ok     {file.name}: {said}", flush=True)
    print(f"{len(asked.files) - failed} of {len(asked.files)} files load and answer")
    return 1 if failed else 0


def answers(asked: argparse.Namespace, file: Path) -> str:
    """Return the answers of both tools. Raises Unfit. `asked` has the tools, the token count and
    threads.
    """
    return f"llama-cli {cli(asked, file)!r}, llama-server {server(asked, file)!r}"


def common(asked: argparse.Namespace, tool: str, file: Path) -> list[str]:
    """Return a tool's command, with its warnings (-lv 3)."""
    threads, predict = str(asked.threads), str(asked.predict)
    return [
        str(asked.tools / tool),
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


def cli(asked: argparse.Namespace, file: Path) -> str:
    """Return llama-cli's answer to one turn."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "answer.txt"
        command = [
            *common(asked, "llama-cli", file),
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
                timeout=WAIT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Unfit(f"llama-cli did not end within {WAIT:.0f} s") from None
        told = done.stdout + done.stderr
        if done.returncode:
            raise Unfit(f"llama-cli: exit {done.returncode}: {told[-400:]}")
        quiet(told, "llama-cli")
        _, _, answer = out.read_text(errors="replace").partition("Assistant:\n")
    return answered(answer, "llama-cli")


def server(asked: argparse.Namespace, file: Path) -> str:
    """Return llama-server's completion of the prompt."""
    port = free_port()
    command = [*common(asked, "llama-server", file), "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            ready(child, f"http://127.0.0.1:{port}/health", log)
            wish = {"prompt": PROMPT, "n_predict": asked.predict, "temperature": 0}
            told = fetch(f"http://127.0.0.1:{port}/completion", json.dumps(wish).encode())
            child.send_signal(signal.SIGINT)
            code = child.wait(WAIT)
        except (OSError, ValueError, subprocess.TimeoutExpired) as problem:
            raise Unfit(f"llama-server: {problem}: {words(log)[-400:]}") from None
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        if code:
            raise Unfit(f"llama-server: exit {code}: {words(log)[-400:]}")
        quiet(words(log), "llama-server")
    return answered(str(json.loads(told)["content"]), "llama-server")


def ready(child: "subprocess.Popen[bytes]", url: str, log: IO[str]) -> None:
    """Wait until the server reports healthy."""
    end = time.monotonic() + WAIT
    while time.monotonic() < end:
        if child.poll() is not None:
            raise Unfit(f"llama-server: exit {child.returncode}: {words(log)[-400:]}")
        try:
            fetch(url)
        except OSError:  # not yet listening, or 503 while loading
            time.sleep(0.1)
        else:
            return
    raise Unfit(f"llama-server was not ready within {WAIT:.0f} s")


def fetch(url: str, body: bytes | None = None) -> bytes:
    """GET, or POST of JSON, to loopback without a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with opener.open(request, timeout=WAIT) as answer:
        return bytes(answer.read())


def words(log: IO[str]) -> str:
    """Return the whole log."""
    log.seek(0)
    return log.read()


def quiet(told: str, tool: str) -> None:
    """Raise Unfit if a tensor was warned about."""
    found = TENSORS.findall(told)
    if found:
        raise Unfit(f"{tool} warns: {found[0].strip()}")


def answered(text: str, tool: str) -> str:
    """Return the beginning of an answer. Raises Unfit if it is empty."""
    if not text.strip():
        raise Unfit(f"{tool} answered nothing")
    return " ".join(text.split())[:60]


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return int(some.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
