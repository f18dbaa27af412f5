#!/usr/bin/env python3
"""Kill writers of the prefix cache on disk at random moments, and let two evict at once.

usage: .venv/bin/python scripts/crash/disk_cache.py [REF] [--kills 100] [--servers 6]
       [--seconds 10] [--seed 0]

1. A process writes states of 4 MB in a loop, and is killed by SIGKILL after a random time, `--kills`
   times. After each kill the folder is opened as a server opens it: every file under a final name
   must have the bytes of its name, and no temporary file may be left.
2. Two such processes share a folder whose quota has room for five states, for `--seconds`. The bytes
   of all files, temporary ones too, must never exceed the quota by more than one state, and every
   file must be whole.
3. A server of REF with `--cache-dir` is killed while it answers and writes, `--servers` times. The
   next one must give the same texts as a server with `--reproducible`, which has no such cache.

The script exits with 1 if anything differs.
"""

import argparse
import hashlib
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from llmcli.runtime.disk_cache.entry import Entry  # noqa: E402
from llmcli.runtime.disk_cache.folder import StateFolder, find_leftovers  # noqa: E402
from llmcli.runtime.state_file_format import UnusableState  # noqa: E402

STATE_BYTES = 4 << 20
TIGHT_BYTES = 5 * STATE_BYTES + (1 << 16)
N_VOCAB = 1 << 16
WORLD = {"model": "none"}
PROMPTS = [f"{number} " + "once upon a time there was a little girl. " * 12 for number in range(4)]


def open_folder(root: Path, max_bytes: int) -> StateFolder:
    """Open the folder as a server opens it."""
    folder = StateFolder(root, WORLD, max_bytes, ())
    folder.open()
    return folder


def entry_of(number: int) -> Entry:
    """Return the entry of a state."""
    digest = hashlib.sha256(str(number).encode()).digest()[:16]
    return Entry("whole", 0, ((16, digest),), STATE_BYTES)


def state_name(number: int) -> str:
    """Return the name of the file of a state."""
    return entry_of(number).name


def state_of(number: int) -> tuple[Entry, list[int], bytes]:
    """Return an entry of which every byte follows from its number."""
    state = random.Random(number).randbytes(1 << 10) * (STATE_BYTES >> 10)
    return entry_of(number), [number % N_VOCAB] * 16, state


def write_states(root: Path, max_bytes: int, first: int) -> None:
    """Write states until the process is killed, and print a line after the first."""
    folder = open_folder(root, max_bytes)
    for number in count(first):
        folder.write(*state_of(number))
        if number == first:
            print("begun", flush=True)


@contextmanager
def writer(root: Path, max_bytes: int, first: int) -> Iterator[subprocess.Popen[str]]:
    """Run a process that writes states, from its first state on. It is killed at the end."""
    words = [sys.executable, __file__, "--write", str(root), str(max_bytes), str(first)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            yield process
        finally:
            process.kill()


def check_states(root: Path, numbers: Iterable[int]) -> list[str]:
    """Return what is wrong with the states in a folder. `numbers`: those that may be there."""
    folder = StateFolder(root, WORLD, TIGHT_BYTES, ())
    numbers_by_name = {state_name(number): number for number in numbers}
    problems = []
    for name in folder.list_names():
        try:
            _, body = folder.read(name, N_VOCAB)
        except UnusableState as error:
            problems.append(f"{name}: {error}")
            continue
        if name not in numbers_by_name:
            problems.append(f"{name} was not written")
        elif bytes(body.state) != state_of(numbers_by_name[name])[2]:
            problems.append(f"{name} has the bytes of another state")
    return problems


def kill_writers(root: Path, kills: int, rng: random.Random) -> list[str]:
    """Kill a writer at random moments. Return what is wrong."""
    problems: list[str] = []
    numbers: list[int] = []
    n_leftovers = 0
    for number in range(kills):
        with writer(root, TIGHT_BYTES, 1000 * number) as process:
            time.sleep(rng.uniform(0.0, 0.15))
            process.kill()
            process.wait()
        n_leftovers += len(find_leftovers(root))
        open_folder(root, TIGHT_BYTES)
        problems += [f"{path} is left" for path in find_leftovers(root)]
        numbers += range(1000 * number, 1000 * number + 200)
        problems += check_states(root, numbers)
    print(f"writers killed        {kills}, {n_leftovers} of them within a file")
    return problems


def evict_together(root: Path, seconds: float) -> list[str]:
    """Let two writers evict at a quota of five states. Return what is wrong."""
    most, problems = 0, list[str]()
    with writer(root, TIGHT_BYTES, 0) as first, writer(root, TIGHT_BYTES, 500_000) as second:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            nbytes = 0
            for path in root.glob("*/*"):
                with suppress(OSError):
                    nbytes += path.stat().st_size
            most = max(most, nbytes)
        for process in (first, second):
            if process.poll() is not None:
                problems.append(f"a writer has ended with {process.returncode}")
    states = open_folder(root, TIGHT_BYTES).list_names()
    if most > TIGHT_BYTES + STATE_BYTES + (1 << 16):
        problems.append(f"{most} bytes at a quota of {TIGHT_BYTES}")
    if not states:
        problems.append("no state is left")
    print(
        f"two writers           at most {most / TIGHT_BYTES:.2f} of the quota, {len(states)} states left"
    )
    return problems + check_states(root, (*range(20_000), *range(500_000, 520_000)))


@contextmanager
def serve(model: str, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `llmcli serve`. Yield the process and its address."""
    words = [sys.executable, "-m", "llmcli.app", "serve", model, "--port", "0", "--json"]
    words += ["-t", "1", "-np", "2", "-c", "2048", "-ctk", "q8_0", *flags]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())["url"]
        finally:
            process.kill()


def ask(url: str, prompt: str) -> tuple[str, int]:
    """Return an answer, and how many tokens of its prompt came from the disk."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer = json.load(response)
    details = answer["usage"]["prompt_tokens_details"]
    return answer["choices"][0]["text"], details.get("disk_tokens", 0)


def kill_servers(model: str, root: Path, kills: int, rng: random.Random) -> list[str]:
    """Kill servers while they answer and write. Return what is wrong."""
    with serve(model, "--reproducible") as (_, url):
        expected = {prompt: ask(url, prompt)[0] for prompt in PROMPTS}
    problems: list[str] = []
    n_disk = 0

    def play(url: str) -> None:
        """Send all prompts in another order each time, until the server is killed."""
        # an answer that is cut off in the middle is no OSError
        with suppress(OSError, http.client.HTTPException, ValueError):
            while True:
                for prompt in rng.sample(PROMPTS, len(PROMPTS)):
                    ask(url, prompt)

    for _ in range(kills):
        with serve(model, "--cache-dir", str(root)) as (process, url):
            for prompt, text in expected.items():
                found, n_tokens = ask(url, prompt)
                n_disk += n_tokens
                if found != text:
                    problems.append(f"{found!r} instead of {text!r}")
            player = threading.Thread(target=play, args=[url])
            player.start()
            time.sleep(rng.uniform(0.0, 0.5))
            process.send_signal(signal.SIGKILL)
            process.wait()
            player.join()
    print(f"servers killed        {kills}, {n_disk} tokens from the disk")
    if not n_disk:
        problems.append("nothing was read from the disk")
    return problems


def main() -> int:
    """Run the three parts, and print what is wrong."""
    if sys.argv[1:2] == ["--write"]:
        write_states(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ref", nargs="?", default="smollm2:135m")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--servers", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        scratch = Path(name)
        problems = kill_writers(scratch / "killed", args.kills, rng)
        problems += evict_together(scratch / "shared", args.seconds)
        problems += kill_servers(args.ref, scratch / "served", args.servers, rng)
    print("\n".join(problems) or "all right")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
