#!/usr/bin/env python3
"""Record a chat that uses every REPL command in a pseudo-terminal, and write the visible text.

usage: .venv/bin/python scripts/transcript/record.py MODEL.gguf [-o FILE] [--predict 40]
       [-t N]

SCENES below has the typed lines that show each command. The commands come from the REPL's registry;
one without a scene is typed without arguments. The chat runs in a temporary folder, shown as `.` in
the text, with a copy of the model. The script fails if a command is not used, a scene is for an
unknown command, a traceback appears, or the chat does not end with exit code 0.
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
from scripts.transcript.terminal import TerminalScreen

ROOT = Path(__file__).parents[2]
WIDTH, HEIGHT = 100, 40
READY = r"\x1b\[\?2004h[^\n]*>>>"  # a new prompt switches bracketed paste on
PATIENCE = 120  # seconds for one answer
NOTES = "The harbour of Lund closes at nine.\nThe ferry to Marstal leaves at eight, on Sundays at ten.\n"

ABOUT = "A chat that uses every command, as a terminal shows it (scripts/transcript/record.py)."

# The typed lines by the command that they show; "" has lines that are no command. `{model}` is the
# model's file. A Tab is followed by the expected completion.
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
    """Return all lines to type, in order. `model`: the model's file. Raises SystemExit if a scene
    is for an unknown command.
    """
    registered = commands.commands()
    if unknown := [name for name in SCENES if name and name not in registered]:
        raise SystemExit(f"scenes of unknown commands: {', '.join(unknown)}")
    others = [f"/{name}" for name in registered if name not in SCENES and f"/{name}" not in LAST]
    typed = [line.replace("{model}", model) for scene in SCENES.values() for line in scene]
    clear_index = typed.index("/clear")
    return [*typed[:clear_index], *others, *typed[clear_index:], *LAST]


def unused_commands(typed: list[str]) -> list[str]:
    """Return the names of the registered commands that no typed line uses."""
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
    """Run the chat and return its transcript: the visible text of the whole chat, and the status
    line at the bottom as it was half way through. Raises SystemExit if the chat fails.
    """
    file = f"./{model.name}"
    typed = scenes(file)
    if missing := unused_commands(typed):
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
        # The screen collects the output and answers the requests for the cursor position.
        screen = child.logfile_read = TerminalScreen(WIDTH, HEIGHT, child.send)
        bottom = ""
        for number, line in enumerate(typed):
            _until(child, READY, line)
            if number == len(typed) // 2:
                child.expect(r"tokens · .*\x1b\[\?25h")  # fully drawn: the cursor is visible again
                bottom = "".join(screen.lines[-1]).rstrip()
            start, tab, remaining = line.partition("\t")
            child.send(start + tab)
            if tab:
                _until(child, remaining, line)  # the completion
            child.send("\r" if tab else f"{remaining}\r")
        _until(child, pexpect.EOF, typed[-1])
        child.close()
    text = screen.text().replace(f"{folder}/", "./")
    if child.exitstatus or "Traceback" in text:
        raise SystemExit(f"{text[-4000:]}\nthe chat ended with {child.exitstatus}")
    return f"{ABOUT}\n\n{text}\nThe line at the bottom, half way through:\n{bottom}\n"


def _until(child: pexpect.spawn, pattern: object, line: str) -> None:
    try:
        child.expect(pattern)
    except (pexpect.TIMEOUT, pexpect.EOF):
        raise SystemExit(
            f"{(child.before or '')[-4000:]}\nno prompt came back; next was {line!r}"
        ) from None


def main() -> None:
    """Parse the flags, record the chat, and write the transcript to a file or to stdout."""
    parser = argparse.ArgumentParser(usage=(__doc__ or "").split("usage: ")[1].split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--predict", type=int, default=40)
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    text = record(args.model.absolute(), args.predict, args.threads)
    if args.output:
        args.output.write_text(text, encoding="utf-8")
        print(
            f"{len(scenes(args.model.name))} lines typed, {text.count(chr(10))} lines shown: {args.output}"
        )
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
