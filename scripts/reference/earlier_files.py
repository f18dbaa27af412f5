#!/usr/bin/env python3
"""Write tests/data/earlier: every kind of file that llmcli stores, as an earlier version wrote it.

usage: .venv/bin/python scripts/reference/earlier_files.py TREE OUT [--python PYTHON]

TREE is a checkout of the earlier version, and OUT a new folder. The files in the repository were
written by the version before the packages were renamed. KILL_CALIBRATE and KILL_QUANTIZE name
modules of that version. In the files, the path of the work folder is replaced by FOLDER, and the
version of llama-cpp-python in the state of a killed run by BUILD; tests/test_earlier_files.py puts
its own values there. Models have TIME_NS as their modification time, because some files contain it.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import gguf
import numpy as np

from scripts.reference.recorded_tree import PROGRAM, RecordedTree

ROOT = Path(__file__).resolve().parents[2]
TIME_NS = 1_760_000_000_000_000_000
STEADY = "-fa on -t 1"
CHAT = f"chat tales --no-profile {STEADY} -c 256 -n 20 --temp 0 -s 3 --chat-template template.jinja"
BATCH = (
    f"batch tales --no-profile batch.jsonl -o answers.jsonl -np 1 --temp 0 -c 256 {STEADY} --json"
)
CALIBRATE = "calibrate little.gguf --text prose.txt -c 32 --chunks 8 -fa off -t 1 --json"
EVAL = f"--text prose.txt -c 64 --chunks 3 {STEADY} --json"
BENCH = f"bench tales {STEADY} -p 16 -n 8 -r 2 --json"
# The template names the tags, so that answers are split into thinking and content.
TEMPLATE = (
    '{% for m in messages %}<{{ m.role }}>{{ m.content.split("</think>")[-1] }}\n{% endfor %}'
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
BRANCHES = """\
Who was there?
What was the name?
/undo
/regen
And the dog?
/edit 1 Where was it?
/branch other
/set temp 0.5
What came then?
/switch 1
"""
THINKING = """\
/set grammar root ::= "<think>" [a-z ]{4,8} "</think>" [a-z ]{4,8}
Who was there?
"""
SAVED = "Who was there?\n/save kept\n"
# Code that runs before the program and makes its process end in the middle of the work, as by kill
# -9.
KILL_CALIBRATE = """
import os
from quant import gather, interim
interim.EVERY = interim.SHARE = 0
groups = gather.groups
gather.groups = lambda survey, left, memory: groups(survey, left, 600_000)  # several passes
save, saves = interim.Interim.save, []
def save_and_count(self, progress):
    save(self, progress)
    saves.append(progress)
    if len(saves) == SAVES:
        os.kill(os.getpid(), 9)
interim.Interim.save = save_and_count
"""
KILL_QUANTIZE = """
import os
from quant import draft
note, notes = draft.Draft.note, []
def note_and_count(self, *, now=True):
    note(self)
    notes.append(self.position)
    if self.position > self.plan.nbytes // 2:
        os.kill(os.getpid(), 9)
draft.Draft.note = note_and_count
"""


class EarlierTree:
    """The earlier version, run in a work folder. `expected`: the JSON output of commands, with
    which the tests compare.
    """

    def __init__(self, tree: Path, python: str, work: Path) -> None:
        self.work, self.python = work, python
        self.recorded = RecordedTree(tree, python, work)
        self.recorded.check_imports()
        self.expected: dict[str, object] = {}

    def run(self, line: str, stdin: str = "") -> str:
        """Run a command line of llmcli; return its stdout. Raises SystemExit if it fails."""
        done = self.recorded.run(line, stdin)
        if done.returncode:
            raise SystemExit(f"{line}: {done.returncode}\n{done.stderr.decode()}")
        return done.stdout.decode()

    def expect(self, line: str) -> None:
        """Run a command and store its JSON output in `expected`."""
        self.expected[line] = json.loads(self.run(line))

    def kill(self, prefix: str, line: str) -> None:
        """Run a command after the code `prefix`, which must kill it. Raises SystemExit if the
        command ends otherwise.
        """
        command = [self.python, "-c", prefix + PROGRAM, *line.split()]
        done = subprocess.run(
            command, cwd=self.work, env=self.recorded.environment, capture_output=True, check=False
        )
        if done.returncode != -signal.SIGKILL:
            raise SystemExit(f"{line} was not killed: {done.stderr.decode()}")

    def kill_when(self, line: str, stdin: str, is_time: Callable[[], bool]) -> None:
        """Run a command, and kill it as soon as `is_time` returns True. Raises SystemExit if it
        ends before.
        """
        command = [self.python, "-c", PROGRAM, *line.split()]
        child = subprocess.Popen(
            command, cwd=self.work, env=self.recorded.environment, stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert child.stdin
        child.stdin.write(stdin.encode())
        child.stdin.close()
        while not is_time():
            if child.poll() is not None:
                raise SystemExit(f"{line} ended before it was killed")
        child.kill()
        child.wait()


def main() -> None:
    """Parse the flags, write all files with the earlier version, and copy them to OUT."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tree", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", default=sys.executable)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        earlier = EarlierTree(arguments.tree.resolve(), arguments.python, Path(folder).resolve())
        write_inputs(earlier)
        write_models(earlier)
        write_measurements(earlier)
        write_calibrations(earlier)
        write_chats(earlier)
        write_batch(earlier)
        (earlier.work / "expected.json").write_text(json.dumps(earlier.expected, indent=1))
        copy_without_paths(earlier.work, arguments.out)


def write_inputs(earlier: EarlierTree) -> None:
    """Write the models and texts that the commands read, and the user's catalog with the models."""
    work = earlier.work
    words = ["the", "cat", "sat", "by", "a", "river", "and", "one", "dog", "ran", "home", "again"]
    order = np.random.default_rng(3).integers(len(words), size=400)
    (work / "prose.txt").write_text(" ".join(words[index] for index in order))
    (work / "template.jinja").write_text(TEMPLATE)
    lines = [
        {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions",
         "body": {"prompt": f"One day, {number} cats", "max_tokens": 24}}
        for number in range(30)
    ]  # fmt: skip
    (work / "batch.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_little_model(work / "little.gguf")
    stories = ROOT / "tests/data/stories260K"
    earlier.run(f"convert {stories} -o {work}/tales.gguf --outtype q8_0 --threads 1")
    for name in ("little.gguf", "tales.gguf"):
        os.utime(work / name, ns=(TIME_NS, TIME_NS))
    catalog = work / "home/config/models.toml"
    catalog.parent.mkdir(parents=True, exist_ok=True)
    catalog.write_text("".join(
        f'[models.{name}]\ndescription = "{name}"\n[[models.{name}.sources]]\nkind = "local"\n'
        f'path = "{work}/{name}.gguf"\n\n'
        for name in ("tales", "little")
    ))  # fmt: skip


def write_little_model(path: Path) -> None:
    """Write a GGUF of a random Llama of one block, so small that its second moments fit into a few
    KB.
    """
    vocabulary, hidden, feed_forward = 300, 32, 64
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(hidden // 4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("llama")
    letters = [f"<0x{byte:02X}>" for byte in range(256)]
    writer.add_token_list(["<unk>", "<s>", "</s>", *letters, *(f"\u2581w{n}" for n in range(41))])
    writer.add_token_scores([-float(index) for index in range(vocabulary)])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * 41])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    shapes = {
        "token_embd": (vocabulary, hidden), "output_norm": (hidden,), "blk.0.attn_norm": (hidden,),
        "blk.0.attn_q": (hidden, hidden), "blk.0.attn_k": (hidden // 2, hidden),
        "blk.0.attn_v": (hidden // 2, hidden), "blk.0.attn_output": (hidden, hidden),
        "blk.0.ffn_norm": (hidden,), "blk.0.ffn_gate": (feed_forward, hidden),
        "blk.0.ffn_up": (feed_forward, hidden), "blk.0.ffn_down": (hidden, feed_forward),
    }  # fmt: skip
    random = np.random.default_rng(1)
    for name, shape in shapes.items():
        if len(shape) == 1:
            values = random.normal(1.0, 0.1, shape).astype(np.float32)
        else:
            values = random.normal(0.0, 0.2, shape).astype(np.float16)
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_models(earlier: EarlierTree) -> None:
    """Write manifests, an alias, a plan, a certificate, and the files of a killed quantization."""
    earlier.run("pull tales --offline --json")
    earlier.run("pull little --offline --json")
    earlier.run("pull little --offline --quant Q8_0 --json")
    earlier.run("alias poet tales --system Rhyme. --temp 0.25 --set top_k=7")
    earlier.expect("list --json")
    earlier.expect("show little --json")
    earlier.expect("show poet --json")
    earlier.run(
        "quantize little.gguf --target-bpw 10 --quick --types q4_0,q8_0,q5_0 --threads 1"
        " --plan-out plan.json -o mix.gguf"
    )
    earlier.expect("show mix.gguf --tensors --json")
    earlier.run(
        "quantize little.gguf --type Q8_0 --threads 1 --verify --verify-text prose.txt"
        " --verify-chunks 1 -o verified.gguf"
    )
    earlier.expect("show verified.gguf --check --json")
    earlier.kill(KILL_QUANTIZE, "quantize little.gguf --type Q8_0 -o killed.gguf --threads 1")
    for name in ("mix.gguf", "verified.certificate.html", "verified.certificate.md"):
        (earlier.work / name).unlink()


def write_measurements(earlier: EarlierTree) -> None:
    """Write the history of bench, a tuned profile, and the logits of a base model."""
    earlier.run(BENCH)
    earlier.run(BENCH.replace("-p 16", "-p 32"))
    earlier.run(BENCH)
    earlier.expect("bench history --json")
    earlier.expect("bench compare 1 5 --json")
    earlier.run("bench tune tales --budget 12 --json")
    earlier.expect("bench tune --show --json")
    earlier.run(f"eval tales --save-base base.logits {EVAL}")
    earlier.expect(f"eval tales --base-logits base.logits {STEADY} --json")


def write_calibrations(earlier: EarlierTree) -> None:
    """Write an importance matrix, second moments, and the states of two killed calibrations."""
    earlier.run(f"{CALIBRATE} -o imatrix.gguf --moments moments.gguf")
    earlier.kill(KILL_CALIBRATE.replace("SAVES", "5"), f"{CALIBRATE} -o killed-imatrix.gguf")
    earlier.kill(
        KILL_CALIBRATE.replace("SAVES", "4"),
        f"{CALIBRATE} -o killed-both.gguf --moments killed-moments.gguf",
    )


def write_chats(earlier: EarlierTree) -> None:
    """Write the logs of a chat with branches, a chat with thinking and a killed chat, and a saved
    chat.
    """
    sessions = earlier.work / "home/state/sessions"

    def name_newest(name: str) -> None:
        newest = max(sessions.glob("2*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
        newest.rename(sessions / f"{name}.jsonl")

    earlier.run(f"{CHAT} -sys Rhyme.", BRANCHES)
    name_newest("19990101T000000-1")
    earlier.run(CHAT, THINKING)
    name_newest("19990102T000000-2")
    earlier.run(CHAT, SAVED)
    name_newest("19990103T000000-3")

    def is_answering() -> bool:
        logs = [path.read_text() for path in sessions.glob("2*.jsonl")]
        return any(text.count("\n") == 1 and not text.endswith("\n") for text in logs)

    earlier.kill_when(
        CHAT.replace("-n 20", "-n 200"), "Who was there?\nWhat came then?\n", is_answering
    )
    name_newest("19990104T000000-4")
    for name in ("19990101T000000-1", "19990102T000000-2", "19990104T000000-4", "kept"):
        earlier.expect(f"sessions show {name} --json")


def write_batch(earlier: EarlierTree) -> None:
    """Write the output of a batch, and the journal of the same batch when it was killed."""
    journal = earlier.work / ".answers.jsonl.journal"
    earlier.run(BATCH)
    (earlier.work / "answers.jsonl").rename(earlier.work / "whole-answers.jsonl")
    earlier.kill_when(BATCH, "", lambda: journal.exists() and journal.read_bytes().count(b"\n") > 8)


def copy_without_paths(work: Path, out: Path) -> None:
    """Copy the files to `out`. In text files and in the database, replace the work folder and the
    version of llama-cpp-python by FOLDER and BUILD. Raises SystemExit if a path remains.
    """
    build = importlib.metadata.version("llama-cpp-python")
    unneeded = shutil.ignore_patterns("bytecode", "cache", "*.lock", "huggingface")
    shutil.copytree(work, out, ignore=unneeded)
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        data = path.read_bytes()
        head, newline, records = data.partition(b"\n")
        if head.startswith(b'{"format": "llmcli records') or path.suffix == ".journal":
            # The state of a killed run: a line of text, then binary records.
            text = head.decode().replace(str(work), "FOLDER").replace(f'"{build}"', '"BUILD"')
            path.write_bytes(text.encode() + newline + records)
        elif path.suffix in (".json", ".jsonl", ".toml"):
            path.write_text(data.decode().replace(str(work), "FOLDER"))
        elif path.suffix == ".sqlite":
            replace_in_database(path, str(work), "FOLDER")
        if str(work).encode() in path.read_bytes():
            raise SystemExit(f"{path} contains the path of the work folder")
        print(f"{path.stat().st_size:9,} {path.relative_to(out)}")


def replace_in_database(path: Path, old: str, new: str) -> None:
    """Replace a text in every text column of every table of an SQLite database."""
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        for (table,) in tables:
            for column in database.execute(f"PRAGMA table_info({table})").fetchall():
                if column[2] == "TEXT":
                    column_name = column[1]
                    database.execute(
                        f"UPDATE {table} SET {column_name} = replace({column_name}, ?, ?)",
                        (old, new),
                    )
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("VACUUM")


if __name__ == "__main__":
    main()
