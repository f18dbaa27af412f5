"""Mutate the files that llmcli writes and reads back, and run the commands that read them.

usage: .venv/bin/python scripts/fuzz/own_json.py [--count 3000] [--seed 0] [--only KIND]

The files are: manifests of the store, saved chats with their KV states, session logs, journals of
batches and quantizations, tuned profiles, saved measurements, plan files, the history of bench,
verdicts of rehearsals, certificates, records of evaluations, states of calibrations, results of
pareto, receipts, and models.toml. They are made by the commands themselves, with the test model
stories260K.

Each mutant is read by a process with limited memory and time. It is a failure if the process ends
by a signal, prints a traceback, needs more than 60 seconds or 2 GiB more memory than at its start,
prints a control character or JSON that cannot be parsed, or reports an error without the file's
name or without a hint.
"""

import argparse
import contextlib
import io
import json
import os
import random
import resource
import select
import shutil
import sqlite3
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.fuzz.files import convert_stories
from scripts.fuzz.json_mutations import mutate_json, mutate_lines

SECONDS, MEMORY = 60.0, 2 << 30
QUICK = ("-n", "2", "-t", "1", "-c", "128", "--temp", "0")
LINES = b'"Once"\n{"prompt": "Two", "max_tokens": 2}\n"Three"\n'

Mutate = Callable[[Path, random.Random], str]


@dataclass(frozen=True)
class OwnFile:
    """A kind of file that llmcli writes.

    `pattern`: where it is, below the folder of a trial. `commands`: the command lines that read it;
    MODEL and WORK in them are the model file and the folder. `mutate` changes the file and returns
    a description. `refused`: whether a command that refuses it must name the file.
    """

    pattern: str
    commands: tuple[tuple[str, ...], ...]
    mutate: Mutate
    stdin: bytes = b""
    refused: bool = False


# Mutations of a file.


def _mutate_text(change: Callable[[bytes, random.Random], tuple[bytes, str]]) -> Mutate:
    def mutate(file: Path, rng: random.Random) -> str:
        data, mutation = change(file.read_bytes(), rng)
        file.write_bytes(data)
        return mutation

    return mutate


def _mutate_batch_journal(file: Path, rng: random.Random) -> str:
    """Mutate the first line, or a record. After a change of its index, a record gets the right
    checksum.
    """
    head, *records = file.read_bytes().split(b"\n")
    if rng.random() < 0.5 or not records[0]:
        head, mutation = mutate_json(head, rng)
    else:
        number = rng.randrange(len(records))
        check, _, body = records[number].partition(b" ")
        if rng.random() < 0.5:
            body = rng.choice((b"", b"-1 {}", b"9" * 5000 + b" {}", b"x {}", b"7 {}"))
            check, mutation = b"%08x" % zlib.crc32(body), f"record {body[:9]!r}"
        else:
            body, mutation = mutate_json(body, rng)
        records[number] = check + b" " + body.replace(b"\n", b"")
    file.write_bytes(b"\n".join([head, *records]))
    return mutation


def _mutate_database(file: Path, rng: random.Random) -> str:
    """Mutate the document of a random run of the history."""
    with contextlib.closing(sqlite3.connect(file)) as db:
        rows = db.execute("SELECT id, document FROM runs").fetchall()
        number, document = rng.choice(rows)
        raw, mutation = mutate_json(document.encode(), rng)
        text = raw.decode("utf-8", "replace")
        db.execute("UPDATE runs SET document = ? WHERE id = ?", (text, number))
        db.commit()
    return mutation


def _mutate_state_file(file: Path, rng: random.Random) -> str:
    """Mutate the head of a KV state: its JSON, or the length before it."""
    data = file.read_bytes()
    start = data.index(b"{") - 4
    length = int.from_bytes(data[start : start + 4], "little")
    head, mutation = mutate_json(data[start + 4 : start + 4 + length], rng)
    size = rng.choice((len(head), len(head), len(head), length, 0, 2**32 - 1))
    rest = data[start + 4 + length :]
    file.write_bytes(data[:start] + size.to_bytes(4, "little") + head + rest)
    return mutation


def _mutate_records(file: Path, rng: random.Random) -> str:
    """Mutate the head of a record file, or its first record, with the right checksum."""
    head, _, body = file.read_bytes().partition(b"\n")
    if rng.random() < 0.5:
        head, mutation = mutate_json(head, rng)
    else:
        number, nbytes, _ = struct.unpack("<IQI", body[:16])
        raw, rest = body[16 : 16 + nbytes], body[16 + nbytes :]
        raw, mutation = mutate_json(raw, rng)
        body = struct.pack("<IQI", number, len(raw), zlib.crc32(raw)) + raw + rest
    file.write_bytes(head + b"\n" + body)
    return mutation


# Statements that save a profile for the model file of the first argument, and times of attention.
SAVE_PROFILE = """
import sys
from llmcli.config import load_config
from llmcli.hardware import rpc_workers
from llmcli.planning.measurements import tuned_profile
from llmcli.runtime.model_identity import content_hash
from pathlib import Path
from quant.model_file.read_header import read_header
profile = tuned_profile.TunedProfile(
    "stories", content_hash(read_header(Path(sys.argv[1]))), rpc_workers.machine_and_workers(),
    tuned_profile.build_identity(), "chat", {"threads": 1, "ubatch_size": 64}, 1.2, 1.1, 1.3, "2026-11-22",
)
tuned_profile.save_profile(profile, load_config())
from scripts.fuzz import own_json
own_json.read_attention_times()
raise SystemExit
"""
JSON, LINES_OF_JSON = _mutate_text(mutate_json), _mutate_text(mutate_lines)
CHAT = ("chat", "MODEL", "--resume")
KINDS: dict[str, OwnFile] = {
    "manifest": OwnFile(
        "home/data/models/mine/manifest.json",
        (("list", "--json"), ("show", "mine", "--json"), ("gc", "--dry-run"), ("rm", "mine")),
        JSON,
    ),
    "quantized manifest": OwnFile(
        "home/data/models/*/Q*/manifest.json",
        (("list",), ("run", "MODEL", "Once", "--quant", "q8_0", *QUICK)),
        JSON,
    ),
    "saved chat": OwnFile(
        "home/state/saved/kept.jsonl",
        (("sessions", "--json"), ("sessions", "show", "kept"), (*CHAT, "kept", *QUICK)),
        LINES_OF_JSON,
        b"/tree\n/stats\nOnce\n",
        refused=True,
    ),
    "kv state": OwnFile(
        "home/state/saved/kept.kv", ((*CHAT, "kept", *QUICK),), _mutate_state_file, b"Once\n"
    ),
    "session log": OwnFile(
        "home/state/sessions/*.jsonl",
        (("sessions",), (*CHAT, "last", *QUICK)),
        LINES_OF_JSON,
        b"/tree\nOnce\n",
    ),
    "batch journal": OwnFile(
        "work/.out.jsonl.journal",
        (("batch", "MODEL", "WORK/in.jsonl", "-o", "WORK/out.jsonl", *QUICK),),
        _mutate_batch_journal,
        refused=True,
    ),
    "quantization journal": OwnFile(
        "work/.q.gguf.journal",
        (("quantize", "MODEL", "--q8_0", "-o", "WORK/q.gguf"),),
        LINES_OF_JSON,
    ),
    "profile": OwnFile(
        "home/state/profiles/*.json",
        (("bench", "tune", "--show", "--json"), ("run", "MODEL", "Once", *QUICK)),
        JSON,
    ),
    "attention times": OwnFile("home/cache/attention/*.json", (("READ", "attention"),), JSON),
    "verdict": OwnFile("home/state/rehearsals/*.json", (("run", "MODEL", "Once", *QUICK),), JSON),
    "plan file": OwnFile(
        "work/plan.json",
        (("quantize", "MODEL", "--plan", "WORK/plan.json", "--dry-run", "-o", "WORK/x.gguf"),),
        JSON,
        refused=True,
    ),
    "history": OwnFile(
        "home/data/bench.sqlite",
        (("bench", "history", "--json"), ("bench", "history"), ("bench", "compare", "1", "2")),
        _mutate_database,
    ),
    "measurement": OwnFile(
        "work/bench.json",
        (("bench", "compare", "WORK/bench.json", "WORK/other.json"),),
        JSON,
        refused=True,
    ),
    "evaluation": OwnFile(
        "home/cache/evaluations/*.records",
        (("eval", "MODEL", "--text", "WORK/text.txt", "--chunks", "1", "-c", "64", "-t", "1"),),
        _mutate_records,
    ),
    "certificate": OwnFile("work/certificate.json", (("READ", "certificate"),), JSON, refused=True),
    "comparison": OwnFile("work/point.json", (("READ", "comparison"),), JSON),
    "calibration": OwnFile("work/calibration.state", (("READ", "calibration"),), _mutate_records),
    "errors of types": OwnFile("work/errors.json", (("READ", "errors"),), JSON, refused=True),
    "catalog": OwnFile(
        "home/config/models.toml",
        (("list", "--all", "--json"), ("show", "mine")),
        _mutate_text(lambda raw, rng: _mutate_toml(raw, rng)),
        refused=True,
    ),
    "receipt": OwnFile(
        "work/receipt.json", (("run", "--replay", "WORK/receipt.json"),), JSON, refused=True
    ),
}


def _mutate_toml(raw: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Return a TOML file with one value replaced, or with other bytes."""
    lines = raw.decode().split("\n")
    places = [number for number, line in enumerate(lines) if " = " in line]
    choice = rng.random()
    if choice < 0.3:
        return mutate_json(raw, rng)
    number = rng.choice(places)
    key = lines[number].partition(" = ")[0]
    value = rng.choice(
        (
            "[" * 5000, "1" * 5000, "0x" + "f" * 5000, "{a=" * 3000, "nan", "-inf", "''",
            '"\\u0000"', '"\\u009b2J"', "[[1], [2]]", "1979-05-27", "{}", "-1", "true",
            '"' + "x" * 100_000 + '"', '"/dev/zero"', '"/"', '"~nobody/x"', '"mine"',
        )
    )  # fmt: skip
    if choice < 0.5:
        key = rng.choice(
            (".".join("a" * 20_000), '"\\u0000"', "x", "'a'.\"b\"", '"' + "n" * 9999 + '"')
        )
    if choice > 0.9:
        lines.insert(
            number,
            rng.choice(("[models]", "[[models]]", "[models.mine]", "[" + "a." * 9999 + "b]")),
        )
        return "\n".join(lines).encode(), f"a table before line {number + 1}"
    lines[number] = f"{key} = {value}"
    return "\n".join(lines).encode(), f"{key[:20]} = {value[:20]}"


# The worker process runs one trial per line of stdin, and prints one line of JSON for it.


def run_worker() -> None:
    """Run the trials that come on stdin as JSON: {"words", "stdin", "file"}. For each, print
    {"code", "out", "err"} or {"died": reason}. The memory of the process is limited.
    """
    from quant.native import ggml

    ggml.open_library()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    results = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for line in sys.stdin:
        trial = json.loads(line)
        print(json.dumps(_run_trial(trial)), file=results, flush=True)


def _run_trial(trial: dict[str, Any]) -> dict[str, Any]:
    from llmcli.app import main

    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace") for _ in range(2))
    words, stdin = trial["words"], io.TextIOWrapper(io.BytesIO(trial["stdin"].encode()))
    before = sys.argv, sys.stdin
    code: Any = 0
    try:
        sys.argv, sys.stdin = ["llmcli", *words], stdin
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            _read_directly(words[1], Path(trial["file"])) if words[0] == "READ" else main()
    except SystemExit as end:
        code = end.code or 0
    except MemoryError:
        return {"died": "more than 2 GiB"}
    except BaseException as error:  # noqa: BLE001 - any exception is a failure to report
        last = traceback.extract_tb(error.__traceback__)[-1]
        return {
            "died": f"{type(error).__name__} at {last.filename}:{last.lineno}: {str(error)[:200]}"
        }
    finally:
        sys.argv, sys.stdin = before
    texts = [stream.buffer.getvalue().decode("utf-8", "replace") for stream in (out, err)]
    return {"code": code, "out": texts[0], "err": texts[1][-5000:]}


def _read_directly(kind: str, file: Path) -> None:
    """Read a file whose reader is called deep inside a long command. A UserError is printed as
    main() does.
    """
    from llmcli.errors import UserError
    from llmcli.ui import UI

    try:
        READERS[kind](file)
    except UserError as error:
        UI().error(str(error), error.hint)
        raise SystemExit(1) from None


def _read_certificate(file: Path) -> None:
    from types import SimpleNamespace

    from quant.certificate.certificate import CERTIFICATE_KEY, read_certificate

    text = file.read_bytes().decode("utf-8", "replace")
    read_certificate(SimpleNamespace(metadata={CERTIFICATE_KEY: text}, path=file))  # type: ignore[arg-type]


def _read_comparison(file: Path) -> None:
    from llmcli.workflows.pareto.compare import MAX_RECORD_BYTES, ParetoPoint
    from quant.json_dataclasses import read_json

    with contextlib.suppress(ValueError):
        read_json(ParetoPoint, file, MAX_RECORD_BYTES)


def _calibration_state(file: Path) -> Any:
    from quant.calibration.moments_writer import MomentsInput
    from quant.calibration.resume_file import CalibrationState

    return CalibrationState(
        file, {"kind": "test"}, [MomentsInput(("a",), 4), MomentsInput(("b",), 4)]
    )


def _read_calibration(file: Path) -> None:
    _calibration_state(file).load()


def _read_errors(file: Path) -> None:
    from quant.allocation.sensitivity import parse_errors

    parse_errors("blk.0.attn_q.weight", file.read_bytes(), file)


def read_attention_times(file: Path | None = None) -> None:
    """Let llmcli decide on flash attention. Without `file`, pretend that it was measured."""
    from llmcli.config import load_config
    from llmcli.planning.measurements import attention_stub
    from llmcli.planning.measurements import flash_attention_probe as probe

    times = probe.AttentionTimes(2.0, 1.0)
    probe.measure_attention = lambda case: (times, file is None)
    case = probe.AttentionCase(attention_stub.HeadShape(4, 2, 64), "f16", "f16", 1, 1, 1)
    probe.is_faster_without_flash(case, load_config())


READERS = {
    "attention": read_attention_times,
    "certificate": _read_certificate,
    "comparison": _read_comparison,
    "calibration": _read_calibration,
    "errors": _read_errors,
}


class Worker:
    """The process that runs trials. It is started again when it dies or is too slow."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._start()

    def _start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=_environ(self.folder),
        )

    def run(self, trial: dict[str, Any]) -> dict[str, Any]:
        """Let the process run one trial; return its line of JSON, or {"died": reason}."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(trial) + "\n")
        self.process.stdin.flush()
        began, answer = time.monotonic(), ""
        if select.select([self.process.stdout], [], [], SECONDS)[0]:
            answer = self.process.stdout.readline()
        if answer:
            return dict(json.loads(answer))
        seconds = time.monotonic() - began
        self.process.kill()
        code = self.process.wait()
        self._start()
        return {"died": f"{seconds:.0f} s" if seconds >= SECONDS else f"the process, code {code}"}

    def close(self) -> None:
        """End the process by closing its stdin."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def _environ(folder: Path) -> dict[str, str]:
    """Return the environment of llmcli with its home in a folder and without a network."""
    return {
        **os.environ,
        "LLMCLI_HOME": str(folder / "home"),
        "HF_HOME": str(folder / "home" / "huggingface"),
        "HF_HUB_OFFLINE": "1",
    }


# The files.


def make_files(folder: Path) -> Path:
    """Let llmcli write a file of every kind below `folder`. Return the path of the model."""
    work = folder / "work"
    work.mkdir(parents=True)
    model = convert_stories(folder.parent / "stories.gguf", "F32")
    os.utime(model, (1_700_000_000, 1_700_000_000))
    (work / "in.jsonl").write_bytes(LINES)
    (work / "text.txt").write_text("Once upon a time there was a small house. " * 50)

    def call(*words: str, stdin: bytes = b"", patch: str = "") -> bytes:
        code = f"{patch}\nfrom llmcli.app import main\nmain()"
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            input=stdin,
            capture_output=True,
            cwd=Path(__file__).parents[2],
            env=_environ(folder),
            check=False,
        )
        if done.returncode and not patch:
            raise SystemExit(f"{words}: {done.stderr.decode()}")
        return done.stdout

    config = folder / "home" / "config"
    config.mkdir(parents=True)
    (config / "models.toml").write_text(
        f'[models.mine]\ndescription = "a"\nsystem = "Be brief."\n[models.mine.settings]\ntemp = 0.5\n'
        f'[[models.mine.sources]]\nkind = "local"\npath = "{model}"\n'
        '[models.other]\nalias = "mine"\n'
    )
    stop = "raise KeyboardInterrupt"
    call("pull", "mine")
    talk = b"Once\nTwo\n/undo\nThree\n/save kept\nMore\n"
    call("chat", str(model), *QUICK, stdin=talk)
    call("run", str(model), "Once", "--quant", "q8_0", *QUICK)
    for name in ("bench.json", "other.json"):
        (work / name).write_bytes(
            call("bench", str(model), "-p", "4", "-n", "2", "-r", "2", "-t", "1", "-o", "json")
        )
    call("quantize", str(model), "--q8_0", "--dry-run", "--plan-out", str(work / "plan.json"))
    call(
        "eval", str(model), "--text", str(work / "text.txt"), "--chunks", "1", "-c", "64", "-t", "1"
    )
    call(str(model), patch=SAVE_PROFILE)
    certified = str(folder.parent / "certified.gguf")
    call("quantize", str(model), "--q8_0", "-o", certified, "--verify", "--verify-chunks", "2")
    shutil.move(folder.parent / "certified.certificate.json", work / "certificate.json")
    (work / "receipt.json").write_bytes(call("run", str(model), "Once", "--json", *QUICK))
    call(
        "batch", str(model), str(work / "in.jsonl"), "-o", str(work / "out.jsonl"), *QUICK,
        patch=f"from llmcli.batch.journal import BatchJournal\ndef stop(self): {stop}\nBatchJournal.finish = stop",
    )  # fmt: skip
    call(
        "quantize", str(model), "--q8_0", "-o", str(work / "q.gguf"),
        patch=f"from quant.gguf.resumable_writer import ResumableWriter\ndef stop(self): {stop}\nResumableWriter.finish = stop",
    )  # fmt: skip
    _write_other_files(work)
    return model


def _write_other_files(work: Path) -> None:
    """Write the files that only a long command would write."""
    import numpy as np

    from llmcli.workflows.pareto.compare import ParetoPoint
    from quant.calibration.imatrix_collector import ImatrixCollector
    from quant.calibration.resume_file import CalibrationProgress

    errors = [{"Q4_K": 0.1}, {"Q4_K": 0.0}, 0.1, 1.0, 2.0]
    (work / "errors.json").write_text(json.dumps(errors))
    (work / "point.json").write_text(json.dumps(_sample(ParetoPoint)))
    collector = ImatrixCollector()
    for name in ("a", "b"):
        collector.sums[name], collector.counts[name] = np.ones((1, 4)), np.ones(1)
    state = _calibration_state(work / "calibration.state")
    state.save(CalibrationProgress(collector, None, {1}, 3))


def _sample(kind: Any) -> Any:
    """Return a JSON value that fits a dataclass or the type of a field."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return {field.name: _sample(hints[field.name]) for field in fields(kind)}
    inner = get_args(kind)
    if get_origin(kind) is tuple:
        return [_sample(inner[0])]
    if get_origin(kind) in (UnionType, Union):
        return _sample(inner[0])
    if inner:
        return {"a": _sample(inner[1])}
    return {str: "a", int: 3, float: 0.5, bool: True}.get(kind)


# The run.


def judge(words: tuple[str, ...], result: dict[str, Any], file: Path, kind: OwnFile) -> str:
    """Return "read" or "refused", or a description of the failure."""
    if "died" in result:
        return f"died: {result['died']}"
    out, err, code = result["out"], result["err"], result["code"]
    if "Traceback (most recent call last)" in err:
        return f"died: {err.strip().splitlines()[-1]}"
    if odd := {char for char in out + err if _is_control(char)}:
        return f"wrong: printed {sorted(odd)!r}"
    if "--json" in words and code == 0:
        try:
            json.loads(out)
        except ValueError as error:
            return f"wrong: --json printed no JSON: {error}"
    if code == 0:
        return "read"
    lines = err.strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    if (
        code == 1
        and "--replay" in words
        and not errors
        and any(line.startswith("replay: ") for line in lines)
    ):
        return "read"
    if code not in (1, 2) or not errors:
        return f"wrong: code {code}: {lines[-1:]}"
    name = file.name.lstrip(".").removesuffix(".journal")
    if kind.refused and name not in err and "the plan " not in errors[0]:
        return f"wrong: does not name the file: {errors[0][:200]}"
    if not any(line.startswith("hint: ") for line in lines):
        return f"wrong: no hint: {errors[0][:200]}"
    return "refused"


def _is_control(char: str) -> bool:
    """Return whether a character is C0, DEL, C1 or a bidirectional control."""
    bidirectional = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    return char not in "\n\t" and (unicodedata.category(char) == "Cc" or char in bidirectional)


def run(folder: Path, model: Path, kinds: list[str], count: int, seed: int) -> Counter[str]:
    """Run `count` trials, in turn for each kind. Print each failure, and return the numbers of
    verdicts.
    """
    rng, verdicts, worker = random.Random(seed), Counter[str](), Worker(folder)
    pristine = folder.with_name("pristine")
    shutil.copytree(folder, pristine, symlinks=True)
    for index in range(count):
        name = kinds[index % len(kinds)]
        kind = KINDS[name]
        shutil.rmtree(folder)
        shutil.copytree(pristine, folder, symlinks=True)
        file = rng.choice(sorted(folder.glob(kind.pattern)))
        mutation = kind.mutate(file, rng)
        for words in kind.commands:
            command = [
                word.replace("MODEL", str(model)).replace("WORK", str(folder / "work"))
                for word in words
            ]
            trial = {"words": command, "stdin": kind.stdin.decode(), "file": str(file)}
            verdict = judge(words, worker.run(trial), file, kind)
            verdicts[f"{name}: {verdict.partition(':')[0]}"] += 1
            if verdict.startswith(("died", "wrong")):
                print(f"{name} {index}: {mutation} | {' '.join(words[:3])} | {verdict}", flush=True)
    worker.close()
    return verdicts


def main() -> None:
    """Parse the flags, run, and print the failures and the counts; exit with 1 on a failure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=sorted(KINDS))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        run_worker()
        return
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "trial"
        model = make_files(folder)
        kinds = [args.only] if args.only else sorted(KINDS)
        if missing := [kind for kind in kinds if not list(folder.glob(KINDS[kind].pattern))]:
            raise SystemExit(f"no file was made of the kinds {', '.join(missing)}")
        verdicts = run(folder, model, kinds, args.count, args.seed)
    for verdict, number in sorted(verdicts.items()):
        print(f"{number:6} {verdict}")
    raise SystemExit(any(verdict.endswith(("died", "wrong")) for verdict in verdicts))


if __name__ == "__main__":
    main()
