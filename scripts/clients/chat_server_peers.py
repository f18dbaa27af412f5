#!/usr/bin/env python3
"""Check `llmcli chat --server` in a pseudo-terminal against servers of other projects.

usage: .venv/bin/python scripts/clients/chat_server_peers.py MODEL.gguf [--llama-server PROGRAM]
       [--python PROGRAM] [--threads N]

MODEL.gguf is a small model with a chat template. PROGRAM is llama-server, and a Python that has
llama-cpp-python with its extra `server`; at least one is needed. For each server, the chat is used
as by a person: answers with times of chunks, other answers, branches, a saved and resumed chat, an
export, a model's name, an unreachable server, and a server that is killed during an answer and
started again. Each error must be one line and a hint. A check that fails is printed, and the script
then exits with 1.

For llama-server, the script also prints the times that the chat shows beside the server's own
`timings` of the same answers. They must agree within TOLERANCE.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pexpect

from scripts.clients import recording_proxy
from scripts.transcript.record import HEIGHT, READY, ROOT, WIDTH
from scripts.transcript.terminal import TerminalScreen

SECONDS = 180.0  # time limit of an answer, and of a server's start
LONG_ANSWER = "Write a very long story about the sea."
N_FIRST_WORDS = 5  # of an answer, which must be shown
N_TIMED = 3  # answers whose times are compared
TIMED_TOKENS = 96  # of each of them
TOLERANCE = 0.05  # of the tokens per second
TIMING = re.compile(r"\[ttft \d+ ms · .*tok.* · \d+ chunks? p50 [\d.]+ p99 [\d.]+ ms\]")


class Chat:
    """A chat in a pseudo-terminal. `home`: its folder for settings and sessions."""

    def __init__(self, home: Path, *words: str) -> None:
        environment = os.environ | {
            "TERM": "xterm",
            "PYTHONPATH": str(ROOT),
            "LLMCLI_HOME": str(home),
        }
        self._child = pexpect.spawn(
            sys.executable,
            ["-m", "llmcli.app", "chat", *words],
            cwd=home,
            env=environment,
            dimensions=(HEIGHT, WIDTH),
            timeout=SECONDS,
            encoding="utf-8",
            codec_errors="replace",
        )
        self._child.delaybeforesend = None
        # the screen answers the requests for the cursor position
        self._child.logfile_read = TerminalScreen(WIDTH, HEIGHT, self._child.send)
        self.start = self.read()

    def type(self, line: str) -> str:
        """Type a line, and return what is shown until the next prompt, or the end of the chat."""
        self.send(line)
        return self.read()

    def send(self, line: str) -> None:
        """Type a line, and do not wait."""
        self._child.send(f"{line}\r")

    def read(self) -> str:
        """Return what is shown until the next prompt, or the end of the chat."""
        self._child.expect([READY, pexpect.EOF])
        screen = TerminalScreen(WIDTH, 1000)
        screen.write(str(self._child.before))
        return screen.text()

    def finish(self) -> int | None:
        """Wait until the chat has ended, and return its exit code."""
        self._child.expect(pexpect.EOF)
        self._child.close()
        code: int | None = self._child.exitstatus
        return code


class Checks:
    """The checks of one server, and those that failed."""

    def __init__(self, name: str) -> None:
        self._name, self._n_checks, self.n_failed = name, 0, 0

    def check(self, what: str, is_good: bool, shown: str = "") -> None:
        """Count a check, and print it if it failed. `shown`: what the chat has shown."""
        self._n_checks += 1
        if not is_good:
            self.n_failed += 1
            print(f"  FAILED {self._name}: {what}; shown: {shown[-700:]!r}", flush=True)

    def report(self) -> None:
        """Print the number of checks."""
        n_passed = self._n_checks - self.n_failed
        print(f"{self._name}: {n_passed} of {self._n_checks} checks passed", flush=True)


class Peer:
    """A server of another project. `words`: its command line, to which the port is added."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        self._words, self._log = words, log
        self._process: subprocess.Popen[bytes] | None = None
        with recording_proxy.watch("http://127.0.0.1:1") as (free, _):  # it is free afterwards
            self._port = free.rsplit(":", 1)[1]
        self.url = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start the server, and wait until it lists its model."""
        with self._log.open("ab") as log:
            words = [*self._words, "--port", self._port]
            self._process = subprocess.Popen(words, stdout=log, stderr=log)
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                self.list_models()
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    end = self._log.read_text(errors="replace")[-2000:]
                    raise SystemExit(f"{self._words[0]} did not start:\n{end}") from None
                time.sleep(0.2)

    def list_models(self) -> list[str]:
        """Return the names of its models."""
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=SECONDS) as answer:
            return [model["id"] for model in json.load(answer)["data"]]

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send the server a signal that ends it, and wait for that."""
        if self._process and self._process.poll() is None:
            self._process.send_signal(number)
            self._process.wait(SECONDS)


@contextmanager
def run_peer(words: Sequence[str], log: Path) -> Iterator[Peer]:
    """Run a server during the block."""
    peer = Peer(words, log)
    try:
        peer.start()
        yield peer
    finally:
        peer.end(signal.SIGKILL)


def check_chat(checks: Checks, peer: Peer, home: Path) -> None:
    """Check answers, branches, sessions, the export and the names of models."""
    (model,) = peer.list_models()
    short = ("--server", peer.url, "-n", "16", "--temp", "0")
    chat = Chat(home, *short)
    shown = chat.type("Name three colors.")
    checks.check("an answer and its times", has_answer(shown), shown)
    shown = chat.type("/timing")
    checks.check("/timing has the times of chunks", len(re.findall(r"\n +\d+ ", shown)) > 4, shown)
    chat.type("/set timing tokens")
    shown = chat.type("And one more?")
    checks.check("the times below an answer", len(re.findall(r"\|\d+\.\d", shown)) > 4, shown)
    chat.type("/set timing line")
    shown = chat.type("/regen")
    checks.check("/regen", has_answer(shown), shown)
    shown = chat.type("/undo")
    checks.check("/undo", "Traceback" not in shown and "error" not in shown, shown)
    shown = chat.type("/edit 1 Name three animals.")
    checks.check("/edit", has_answer(shown), shown)
    shown = chat.type("/tree")
    checks.check("/tree shows both branches", "main" in shown and "edit-1" in shown, shown)
    shown = chat.type("/switch main")
    checks.check("/switch", "error" not in shown, shown)
    shown = chat.type("/export md")
    checks.check("/export", "Name three colors." in shown and "## Assistant" in shown, shown)
    shown = chat.type("/model")
    checks.check("/model shows the model", model[:60] in shown.replace("\n", ""), shown)
    shown = chat.type(f"/model {model}")
    checks.check("/model NAME", "error" not in shown, shown)
    shown = chat.type("/model nothing")
    checks.check("/model refuses another name in one line", one_error(shown), shown)
    shown = chat.type("/save kept")
    checks.check("/save", "kept" in shown and "error" not in shown, shown)
    chat.send("/exit")
    checks.check("/exit ends with 0", chat.finish() == 0)
    chat = Chat(home, *short, "--model", model, "--resume", "kept")
    shown = chat.type("/export md")
    checks.check("--resume with --model", "Name three colors." in shown, shown)
    shown = chat.type("Thanks.")
    checks.check("an answer in a resumed chat", has_answer(shown), shown)
    chat.send("/exit")
    checks.check("a resumed chat ends with 0", chat.finish() == 0)


def check_failures(checks: Checks, peer: Peer, home: Path) -> None:
    """Check a server that is killed during an answer, is not there, and is there again."""
    chat = Chat(home, "--server", peer.url, "-n", "16", "--temp", "0")
    with recording_proxy.watch(peer.url) as (url, exchanges):
        cut = Chat(home, "--server", url, "-n", "2000", "--temp", "0")
        cut.send(LONG_ANSWER)
        begun = wait_for_words(exchanges)
        peer.end(signal.SIGKILL)
        shown = cut.read()
        checks.check("a server killed during an answer: one line", one_error(shown), shown)
        checks.check("the text so far is shown", begun in " ".join(shown.split()), shown)
        cut.send("/exit")
        cut.finish()
    shown = chat.type("Name a color.")
    checks.check("no server: one line", one_error(shown), shown)
    checks.check("no server: a hint", "is the server running?" in shown, shown)
    refused = Chat(home, "--server", peer.url)
    checks.check("a chat does not start without a server", one_error(refused.start), refused.start)
    checks.check("it ends with 1", refused.finish() == 1)
    peer.start()
    shown = chat.type("Name a color.")
    checks.check("the server is back", has_answer(shown), shown)
    chat.send("/exit")
    checks.check("the chat ends with 0", chat.finish() == 0)


def wait_for_words(exchanges: Sequence[recording_proxy.Exchange]) -> str:
    """Wait until the answer of the latest exchange has a few words, and return its first words.
    Raises SystemExit if it gets none in time.
    """
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        words = exchanges[-1].text.removeprefix("content: ").split() if exchanges else []
        if len(words) > N_FIRST_WORDS:
            return " ".join(words[:N_FIRST_WORDS])
        time.sleep(0.05)
    raise SystemExit("the server has given no text")


def compare_times(checks: Checks, peer: Peer, home: Path) -> None:
    """Compare the times of answers with the server's own `timings`, and print both."""
    with recording_proxy.watch(peer.url) as (url, exchanges):
        chat = Chat(home, "--server", url, "-n", str(TIMED_TOKENS), "--temp", "0")
        for number in range(N_TIMED):
            shown = chat.type(f"{LONG_ANSWER} It is story {number}.")
            checks.check("an answer and its times", has_answer(shown), shown)
        chat.send("/exit")
        chat.finish()
    logs = (home / "state" / "sessions").glob("*.jsonl")
    log = max(logs, key=lambda path: path.stat().st_mtime)
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    ours = [record["timing"] for record in records if "timing" in record]
    theirs = [
        timings
        for exchange in exchanges
        for document in exchange.documents
        if (timings := document.get("timings"))
    ]
    checks.check("timings of every answer", len(ours) == len(theirs) == N_TIMED)
    for our, their in zip(ours, theirs, strict=False):
        compare_answer(checks, our, their)


def compare_answer(checks: Checks, our: dict[str, Any], their: dict[str, Any]) -> None:
    """Compare and print the times of one answer. Both speeds are of the tokens after the first."""
    speed = their["predicted_per_second"]
    ratio = our["tokens_per_second"] / speed
    print(
        f"  chat: first token {our['ttft_ms']:.1f} ms, {our['tokens_per_second']:.2f} tok/s, "
        f"{our['generated_tokens']} tokens; llama-server: prompt {their['prompt_ms']:.1f} ms, "
        f"{speed:.2f} tok/s, {their['predicted_n']} tokens; speeds {ratio:.4f}",
        flush=True,
    )
    checks.check("the number of tokens", our["generated_tokens"] == their["predicted_n"])
    checks.check("tokens per second", abs(ratio - 1) <= TOLERANCE, f"{ratio}")


def has_answer(shown: str) -> bool:
    """Return whether words and a line of times are shown below the typed line, and no error."""
    answer = " ".join(shown.split("\n")[1:])
    match = TIMING.search(answer)
    is_error = "error:" in shown or "Traceback" in shown
    return match is not None and len(answer[: match.start()].split()) > 1 and not is_error


def one_error(shown: str) -> bool:
    """Return whether one error, and no traceback, is shown."""
    return len(re.findall(r"error:", shown)) == 1 and "Traceback" not in shown


def main() -> int:
    """Check each server, and return 1 if a check failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-server", type=Path, metavar="PROGRAM")
    parser.add_argument("--python", type=Path, metavar="PROGRAM", help="has llama_cpp.server")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if not (args.llama_server or args.python):
        parser.error("--llama-server or --python is needed")
    model, threads, failed = str(args.model.absolute()), str(args.threads), 0
    common: list[Callable[[Checks, Peer, Path], None]] = [check_chat, check_failures]
    peers: list[tuple[str, list[str], list[Callable[[Checks, Peer, Path], None]]]] = []
    if args.llama_server:
        words = [str(args.llama_server), "-m", model, "-c", "4096", "-t", threads]
        peers.append(("llama-server", words, [compare_times, *common]))
    if args.python:
        words = [str(args.python), "-m", "llama_cpp.server", "--model", model]
        words += ["--n_ctx", "4096", "--n_threads", threads]
        peers.append(("llama-cpp-python", words, common))
    for name, words, steps in peers:
        checks = Checks(name)
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            with run_peer(words, home / "server.log") as peer:
                for step in steps:
                    step(checks, peer, home)
        checks.report()
        failed += checks.n_failed
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
