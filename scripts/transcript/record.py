#!/usr/bin/env python3
"""Chat with a model in a pseudo-terminal, use every REPL command, and write the visible text.

usage: .venv/bin/python scripts/transcript/record.py MODEL.gguf [-o FILE] [--predict 40]
       [--threads N]

Commands come from the REPL's registry; a command without a scene here is typed alone. The chat runs
in a temporary folder, which is written as `.`, with a copy of the model. The script fails if a
command is not used, a scene names an unknown command, a traceback appears, or the chat does not end
with exit code 0.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import pexpect

from llmcli.chat import commands
from scripts.transcript.terminal import Paper

ROOT = Path(__file__).parents[2]
WIDTH, HEIGHT = 100, 40
READY = r"\x1b\[\?2004h[^\n]*>>>"  # a new prompt switches bracketed paste on
PATIENCE = 120  # seconds for one answer
NOTES = "The harbour of Lund closes at nine.\nThe ferry to Marstal leaves at eight, on Sundays at ten.\n"

ABOUT = "A chat that uses every command, as a terminal shows it (scripts/transcript/record.py)."

# The typed lines by the command that they show; `{model}` is the model's file. After a Tab comes
# the expected completion.
SCENES: dict[str, list[str]] = {
    "help": ["/help", "/help read", "/? quit"],
    "set": ["/set beams 1", "/set temp 0", "/set top_k 20", "/set", "/set temp 900"],
    "": [
        "Give me one fact about the Moon.",
        "Tell me another.",
        "/tming",
        "//usr/bin is a path, not a command.",
        '"""\rThree words,\rtwo lines."""',
        "One line,\x1b\rand another with Alt-Enter.",
        "/ti\tming",
    ],
    "show": [
        "/show",
        "/show info",
        "/show template",
        "/show parameters",
        "/show license",
        "/show system",
    ],
    "system": ["/system Answer in one short sentence.", "/system", "What is the Sun?"],
    "kv": ["/kv", "/kv 32768"],
    "timing": ["/timing", "/set timing tokens", "And Mars?", "/set timing line"],
    "probs": ["/probs on", "Name a colour.", "/probs", "/probs 1", "/probs off"],
    "regen": ["/regen", "/retry"],
    "undo": ["/undo", "/tree"],
    "edit": ["/edit 1 Give me one fact about Venus."],
    "branch": ["/branch venus", "Tell me more.", "/branch"],
    "switch": ["/switch main", "/switch 1"],
    "read": [
        "/read notes.txt",
        "/read",
        "/read -",
        "/read notes.txt When does the ferry leave?",
        "/read nothing.txt",
    ],
    "export": ["/export md", "/export json talk.json", "/export json talk.json"],
    "save": ["/save moon"],
    "load": ["/load", "/load moon"],
    "model": ["/model", "/model ./nothing.gguf", "/model {model}", "Which model are you?"],
    "bench": ["/bench 64 16"],
    "beams": [
        "/beams",
        "/set beams 4",
        "Say hello.",
        "/beams",
        '/set format {"enum": ["yes", "no"]}',
        "Is the sea salty?",
        "/beams",
        "/set format none",
        "/set beams 1",
    ],
    "clear": ["/clear"],
}
LAST = ["/exit"]


def scenes(model: str) -> list[str]:
    """Return all typed lines in order. Raises SystemExit if a scene names an unknown command."""
    known = commands.commands()
    if gone := [name for name in SCENES if name and name not in known]:
        raise SystemExit(f"scenes of unknown commands: {', '.join(gone)}")
    others = [f"/{name}" for name in known if name not in SCENES and f"/{name}" not in LAST]
    typed = [line.replace("{model}", model) for scene in SCENES.values() for line in scene]
    at = typed.index("/clear")
    return [*typed[:at], *others, *typed[at:], *LAST]


def unused(typed: list[str]) -> list[str]:
    """Return registered commands that no line uses."""
    words = {
        line.removeprefix("/").split()[0]
        for line in typed
        if line.startswith("/") and not line.startswith("//")
    }
    return [
        command.name
        for command in commands.commands().values()
        if words.isdisjoint(command.spellings)
    ]


def record(model: Path, predict: int, threads: int) -> str:
    """Return the visible text of the whole chat, and the bottom line from the middle of it."""
    file = f"./{model.name}"
    typed = scenes(file)
    if missing := unused(typed):
        raise SystemExit(f"commands that are not used: {', '.join(missing)}")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "notes.txt").write_text(NOTES)
        shutil.copyfile(model, Path(folder) / file)
        words = ["-m", "llmcli.app", "chat", file, "--beams", "4", "-c", "4096"]
        words += ["-n", str(predict), "-t", str(threads)]
        home = str(Path(folder) / "home")
        environment = os.environ | {
            "TERM": "xterm",
            "PYTHONPATH": str(ROOT),
            "LLMCLI_HOME": home,
            "PATH": "/bin",
        }
        child = pexpect.spawn(
            sys.executable,
            words,
            cwd=folder,
            env=environment,
            dimensions=(HEIGHT, WIDTH),
            timeout=PATIENCE,
            encoding="utf-8",
            codec_errors="replace",
        )
        child.delaybeforesend = None
        paper = child.logfile_read = Paper(
            WIDTH, HEIGHT, child.send
        )  # it collects the output and answers cursor queries
        bottom = ""
        for number, line in enumerate(typed):
            _until(child, READY, line)
            if number == len(typed) // 2:
                child.expect(r"tokens · .*\x1b\[\?25h")  # fully drawn: the cursor is visible again
                bottom = "".join(paper.lines[-1]).rstrip()
            start, tab, rest = line.partition("\t")
            child.send(start + tab)
            if tab:
                _until(child, rest, line)  # the completion
            child.send("\r" if tab else f"{rest}\r")
        _until(child, pexpect.EOF, typed[-1])
        child.close()
    text = paper.text().replace(f"{folder}/", "./")
    if child.exitstatus or "Traceback" in text:
        raise SystemExit(f"{text[-4000:]}\nthe chat ended with {child.exitstatus}")
    return f"{ABOUT}\n\n{text}\nThe line at the bottom, half way through:\n{bottom}\n"


def _until(child: pexpect.spawn, what: object, line: str) -> None:
    try:
        child.expect(what)
    except (pexpect.TIMEOUT, pexpect.EOF):
        raise SystemExit(
            f"{(child.before or '')[-4000:]}\nno prompt came back; next was {line!r}"
        ) from None


def main() -> None:
    """Parse the arguments, record, write."""
    parser = argparse.ArgumentParser(usage=(__doc__ or "").split("usage: ")[1].split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--predict", type=int, default=40)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    text = record(asked.model.absolute(), asked.predict, asked.threads)
    if asked.output:
        asked.output.write_text(text, encoding="utf-8")
        print(
            f"{len(scenes(asked.model.name))} lines typed, {text.count(chr(10))} lines shown: {asked.output}"
        )
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
