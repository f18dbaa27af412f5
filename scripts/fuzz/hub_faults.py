"""Serve faulty answers of a hub on loopback to `pull` and `quantize`, and watch what they do.

usage: .venv/bin/python scripts/fuzz/hub_faults.py [--count N] [--seed 0] [--only WORD]
       [--slots 6] [--seconds 60] [--report FILE.json]

Each case is one command and one fault: a status from 100 to 599, an odd header, a body that is too
long, too short, damaged or compressed, silence, single bytes from time to time, or a redirect. A
fault is in the listing of the repository, in all its files, or in its weights. Some faults end after
one or two answers; then the command must succeed.

A command must end with exit code 0 and the right file, or with exit code 1 and one line that begins
with "error:". It fails the case if it prints a traceback or the name of an HTTP library, needs more
than --seconds, writes more to the disk than the announced files and one buffer, or succeeds with
wrong bytes. The commands run in processes that are forked from one that has imported everything, so
that a case takes a fraction of a second; only faults that stall take longer. --count runs that many
cases, chosen at random, instead of all; --only those whose label contains a word. --report writes
every outcome.
"""

import argparse
import json
import os
import queue
import random
import re
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.fixtures.fake_hub import Hub
from tests.fixtures.hub_faults import Body, Fault, Pace, Redirect
from tests.quant import tiny_gguf

STORIES = Path(__file__).parents[2] / "tests" / "data" / "stories260K"
GGUF_REPO, CHECKPOINT_REPO = "org/tiny-GGUF", "org/stories"
BUFFER_BYTES = 1 << 16
MEMORY_BYTES = 2 << 30
POLL_SECONDS = 0.02
COMMANDS = {
    "pull": ["pull", GGUF_REPO],
    "pull checkpoint": ["pull", CHECKPOINT_REPO],
    "quantize": ["quantize", CHECKPOINT_REPO, "--q8_0", "--threads", "1", "-o", "{out}"],
}
# (command, kind of answers with the fault)
TARGETS = [
    ("pull", "listing"),
    ("pull", "weights"),
    ("pull checkpoint", "file"),
    ("quantize", "listing"),
    ("quantize", "weights"),
    ("quantize", "file"),
]
USUAL_STATUSES = [
    *(100, 101, 102, 103, 199, 200, 201, 202, 203, 204, 205, 206, 207, 226, 299),
    *(300, 301, 302, 303, 304, 305, 306, 307, 308, 399),
    *(
        400,
        401,
        402,
        403,
        404,
        405,
        408,
        409,
        410,
        411,
        413,
        416,
        418,
        421,
        425,
        426,
        429,
        431,
        451,
    ),
    *(500, 501, 502, 503, 504, 505, 507, 511, 520, 524, 599),
]
ODD_HEADERS: list[dict[str, str | None]] = [
    {"Content-Length": "-1"},
    {"Content-Length": "9" * 30},
    {"Content-Length": "many"},
    {"Content-Length": "0"},
    {"Content-Length": "1048577"},
    {"Content-Range": "bytes 0-9/10"},
    {"Content-Range": "bytes */*"},
    {"Content-Range": "bytes 5-1/" + "9" * 40},
    {"Content-Range": None},
    {"Content-Encoding": "br"},
    {"Content-Encoding": "zstd"},
    {"Content-Encoding": "gzip, gzip"},
    {"Content-Encoding": "identity"},
    {"Content-Encoding": "\udcff"},
    {"Transfer-Encoding": "gzip"},
    {"ETag": '"other"'},
    {"ETag": 'W/"weak"'},
    {"X-Linked-Etag": '"0000"'},
    {"X-Repo-Commit": "0" * 40},
    {"X-Repo-Commit": None},
    {"Set-Cookie": "a=b; Domain=.com; Expires=never"},
    {"Location": "http://127.0.0.1:9/"},
    {"Link": "<http://127.0.0.1:9/>; rel=next"},
    {"X-Filler": "x" * 200_000},
    {"X Space": "1"},
    {"Content-Type": "text/html; charset=utf-99"},
]
REFUSALS: list[Fault] = [
    *(
        Fault(status=status, headers={"Retry-After": pause})
        for status in (429, 503)
        for pause in (
            "0",
            "1",
            "3",
            "86400",
            "9" * 40,
            "-1",
            "soon",
            "Wed, 21 Oct 2099 07:28:00 GMT",
        )
    ),
    Fault(status=429, headers={"RateLimit": '"resolvers";r=0;t=86400'}),
    *(
        Fault(status=status, headers={"X-Error-Code": code, "X-Error-Message": message})
        for status in (401, 403, 404)
        for code, message in (
            ("RepoNotFound", "no"),
            ("RevisionNotFound", "no"),
            ("EntryNotFound", "no"),
            ("GatedRepo", "no"),
            ("\x1b[31m", "\x1b]0;title\x07"),
            ("", "Access to this resource is disabled."),
            ("", "Invalid credentials in Authorization header"),
        )
    ),
]
SHORT_FAULTS: list[Fault] = [
    *(
        Fault(status=status, times=times)
        for status in (500, 502, 503, 504, 408)
        for times in (1, 2)
    ),
    Fault(pace="reset", times=1),
    Fault(pace="reset", times=2),
    Fault(pace="silent", times=1),
    Fault(pace="half", times=1),
    Fault(body="truncated", times=1),
    Fault(body="truncated", times=2),
    Fault(body="bad-chunks", times=1),
]


@dataclass(frozen=True)
class Case:
    """A command, the kind of answers that have a fault, and the fault."""

    command: str
    kind: str
    fault: Fault

    @property
    def label(self) -> str:
        """The case in one line."""
        return f"{self.command} · {self.kind}: {self.fault.label}"


@dataclass(frozen=True)
class Outcome:
    """What a command did. `problems`: why it fails the case. `disk`: the bytes of all files in its
    folder at the worst moment.
    """

    label: str
    code: int | None
    seconds: float
    disk: int
    memory: int
    n_faulty: int
    message: str
    problems: tuple[str, ...]


def list_cases() -> Iterator[Case]:
    """Yield all cases."""
    for status in range(100, 600):
        targets = TARGETS if status in USUAL_STATUSES else [TARGETS[status % len(TARGETS)]]
        for command, kind in targets:
            yield Case(command, kind, Fault(status=status))
    for command, kind in TARGETS:
        for body in get_args(Body)[1:]:
            yield Case(command, kind, Fault(body=body))
        for pace in get_args(Pace)[1:]:
            yield Case(command, kind, Fault(pace=pace))
        for redirect in get_args(Redirect)[1:]:
            yield Case(command, kind, Fault(redirect=redirect))
        for headers in ODD_HEADERS:
            yield Case(command, kind, Fault(headers=headers))
        for fault in (*REFUSALS, *SHORT_FAULTS):
            yield Case(command, kind, fault)


# The worker process forks a child for every job of its standard input.


def run_worker() -> None:
    """Import llmcli, then run a command for each line of stdin, a JSON object with `words`, `env`,
    `folder` and `seconds`. Print a JSON object with its outcome.
    """
    import httpx2  # noqa: F401
    import huggingface_hub  # noqa: F401

    from llmcli import app  # noqa: F401
    from llmcli.catalog import remote_checkpoint  # noqa: F401
    from llmcli.commands.quantize import command  # noqa: F401
    from llmcli.workflows.quantization import quantize  # noqa: F401
    from quant.native import ggml

    ggml.open_library()
    for line in sys.stdin:
        print(json.dumps(run_job(json.loads(line))), flush=True)


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Run one command in a child process. Return its exit code (None if it was ended), its seconds,
    and its peaks of disk and memory in bytes.
    """
    folder, started = Path(job["folder"]), time.monotonic()
    pid = os.fork()
    if not pid:
        run_child(job, folder)
    disk = 0
    while True:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        disk = max(disk, folder_bytes(folder))
        seconds = time.monotonic() - started
        if ended:
            code = os.waitstatus_to_exitcode(status)
            break
        if seconds > job["seconds"]:
            os.kill(pid, 9)
            _, _, usage = os.wait4(pid, 0)
            code = None
            break
        time.sleep(POLL_SECONDS)
    return {"code": code, "seconds": seconds, "disk": disk, "memory": usage.ru_maxrss * 1024}


def run_child(job: dict[str, Any], folder: Path) -> None:
    """Run the command of a job with its output in the folder, and end the process."""
    code = 70
    try:
        for number, name in ((1, "stdout"), (2, "stderr")):
            handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(handle, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(job["env"])
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.argv = ["llmcli", *job["words"]]
        from llmcli.app import main

        main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    except BaseException:  # noqa: BLE001 - what main() does not catch is a failure to report
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder, links not counted."""
    total = 0
    for path in folder.rglob("*"):
        try:
            status = path.lstat()
        except OSError:  # it was renamed or removed
            continue
        if stat.S_ISREG(status.st_mode):
            total += min(status.st_size, status.st_blocks * 512)
    return total


class Slot:
    """A worker process, which runs one case after another."""

    def __init__(self, seconds: float, folder: Path, gguf: bytes) -> None:
        self.seconds, self.folder, self.gguf = seconds, folder, gguf
        self.worker = subprocess.Popen(
            [sys.executable, __file__, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, case: Case, expected: dict[str, tuple[bytes, int]]) -> Outcome:
        """Run a case. `expected`: for each command, the bytes of its file without a fault, and its
        peak of the disk; empty while these are measured.
        """
        home = Path(tempfile.mkdtemp(dir=self.folder))
        out = home / "out.gguf"
        with Hub() as hub:
            hub.add(GGUF_REPO, {"tiny-Q4_K_M.gguf": self.gguf})
            hub.add(CHECKPOINT_REPO, STORIES)
            if case.fault != Fault():
                hub.misbehave(case.kind, case.fault)
            job = {
                "words": [word.format(out=out) for word in COMMANDS[case.command]],
                "env": {
                    "HF_ENDPOINT": hub.url,
                    "HF_HUB_DISABLE_TELEMETRY": "1",
                    "LLMCLI_HOME": str(home / "llmcli"),
                    "HF_HOME": str(home / "hf"),
                    "NO_COLOR": "1",
                },
                "folder": str(home),
                "seconds": self.seconds,
            }
            assert self.worker.stdin and self.worker.stdout
            self.worker.stdin.write(json.dumps(job) + "\n")
            self.worker.stdin.flush()
            result = json.loads(self.worker.stdout.readline())
            n_faulty = hub.n_faulty
        errors = (home / "stderr").read_text(errors="replace")
        content = find_content(case.command, home, out) if result["code"] == 0 else b""
        if not expected:
            assert result["code"] == 0, errors
            # If the server does not send parts of files, `quantize` downloads the announced files.
            announced = sum(len(data) for data in hub.repos[CHECKPOINT_REPO].files.values())
            expected_content = content
            allowed = result["disk"] + announced * (case.command == "quantize")
        else:
            expected_content, allowed = expected[case.command]
        problems = list(find_problems(case, result, errors, content == expected_content, allowed))
        shutil.rmtree(home)
        message = next((x for x in errors.splitlines() if x.startswith("error:")), "")
        if not expected:
            expected_by_case[case.command] = content, allowed
        return Outcome(
            case.label, **result, n_faulty=n_faulty, message=message, problems=tuple(problems)
        )

    def close(self) -> None:
        """End the worker process."""
        assert self.worker.stdin
        self.worker.stdin.close()
        self.worker.wait()


expected_by_case: dict[str, tuple[bytes, int]] = {}


def find_content(command: str, home: Path, out: Path) -> bytes:
    """Return the bytes of the file that a successful command has written, b"" if there is none."""
    name = "*.gguf" if command == "pull" else "*.safetensors"
    pulled = (home / "hf").glob(f"hub/models--*/snapshots/*/{name}")
    file = out if command == "quantize" else next(pulled, out)
    return file.read_bytes() if file.is_file() else b""


def find_problems(
    case: Case, result: dict[str, Any], errors: str, is_same: bool, allowed: int
) -> Iterator[str]:
    """Yield why a command fails a case. `errors`: what it printed on stderr; `is_same`: whether its
    file has the right bytes; `allowed`: the bytes on the disk without a fault.
    """
    if result["code"] is None:
        yield "hang"
    elif result["code"] not in (0, 1):
        yield f"exit code {result['code']}"
    if "Traceback" in errors or re.search(r"httpx2\.|huggingface_hub\.", errors):
        yield "traceback"
    if result["code"] == 1 and errors.count("error: ") != 1:
        yield "no single error line"
    if "\x1b" in errors or "\x07" in errors:
        yield "control characters"
    if result["disk"] > allowed + BUFFER_BYTES:
        yield f"{result['disk'] - allowed:,} bytes too many on the disk"
    if result["memory"] > MEMORY_BYTES:
        yield f"{result['memory'] >> 20:,} MiB of memory"
    if result["code"] == 0 and not is_same:
        yield "wrong bytes"
    if result["code"] == 1 and case.fault in SHORT_FAULTS:
        yield "no recovery"


def main() -> None:
    """Run all cases in several slots, print a summary, and exit with 1 if one has a problem."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slots", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        run_worker()
        return
    cases = [case for case in list_cases() if args.only in case.label]
    if args.count is not None and args.count < len(cases):
        cases = random.Random(args.seed).sample(cases, args.count)
    waiting: queue.SimpleQueue[Case] = queue.SimpleQueue()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        gguf = tiny_gguf.llama(folder / "tiny.gguf", hidden=256, ff=512, layers=2).read_bytes()
        slots = [Slot(args.seconds, folder, gguf) for _ in range(args.slots)]
        for command in COMMANDS:
            slots[0].run(Case(command, "listing", Fault()), {})
        for case in cases:
            waiting.put(case)

        def work(slot: Slot) -> None:
            while True:
                try:
                    case = waiting.get_nowait()
                except queue.Empty:
                    return
                outcome = slot.run(case, expected_by_case)
                outcomes.append(outcome)
                if outcome.problems:
                    print(f"{outcome.label}: {', '.join(outcome.problems)}", flush=True)

        threads = [threading.Thread(target=work, args=(slot,)) for slot in slots]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for slot in slots:
            slot.close()
    if args.report:
        args.report.write_text(json.dumps([vars(outcome) for outcome in outcomes], indent=1))
    print_summary(outcomes)
    sys.exit(any(outcome.problems for outcome in outcomes))


def print_summary(outcomes: list[Outcome]) -> None:
    """Print how many cases had which end, and the slowest one."""
    kinds = Counter(
        re.sub(r"^[0-9,]+ (bytes|MiB)", r"\1", problem)
        for outcome in outcomes
        for problem in outcome.problems
    )
    codes = Counter(outcome.code for outcome in outcomes)
    slowest = max(outcomes, key=lambda outcome: outcome.seconds)
    print(f"{len(outcomes)} cases, {sum(outcome.n_faulty for outcome in outcomes)} faulty answers")
    print(f"  refused in one line: {codes[1]}, succeeded: {codes[0]}")
    print(f"  slowest: {slowest.seconds:.1f} s ({slowest.label})")
    print(f"  most memory: {max(outcome.memory for outcome in outcomes) >> 20} MiB")
    for problem in ("traceback", "hang", "bytes too many on the disk", "wrong bytes"):
        print(f"  {problem}: {kinds.pop(problem, 0)}")
    for problem, count in kinds.items():
        print(f"  {problem}: {count}")


if __name__ == "__main__":
    main()
