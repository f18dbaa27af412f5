#!/usr/bin/env python3
"""Type random keys and commands in the chat, with Ctrl-C, resizes and pastes at random moments.

usage: .venv/bin/python scripts/fuzz/repl.py MODEL.gguf [--count 200] [--seed 0] [--first 0]
       [--keys 40] [--verbose]

The REPL runs in this process on prompt_toolkit's pipe input, so that its state can be checked.
After each sequence of keys there must be no exception and no unfinished answer, the ledger's cell
count must equal llama.cpp's, and user and assistant messages must alternate. Use a small model, such
as tests/data/stories260K converted to GGUF. The script stops at the first sequence that fails and
prints its keys; otherwise it prints one JSON line of figures.
"""

import argparse
import io
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from prompt_toolkit.application import create_app_session
from prompt_toolkit.data_structures import Size
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output.vt100 import Vt100_Output

from llmcli import config
from llmcli.chat import clipboard, commands
from llmcli.chat.chat_session import ChatSession
from llmcli.chat.conversation.conversation import Conversation
from llmcli.chat.local_model import LocalModel
from llmcli.chat.terminal import repl
from llmcli.chat.terminal.completion import complete_line
from llmcli.commands.chat.bench_adapter import measure
from llmcli.model_loader.open_model import ModelSwitcher
from llmcli.model_loader.run_flags import RunFlags
from llmcli.runtime.requests.beam_settings import BeamSettings
from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.sampling import default_sampling
from llmcli.ui import UI, escape_controls

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Ctrl-A … Ctrl-_, without Ctrl-Z and Ctrl-\, which stop or end this process; arrows, Tab,
# Alt-Enter, F-keys.
CONTROL = [
    chr(code) for code in (1, 2, 3, *range(5, 26), 27, 29, 30, 31, 127)
]  # Ctrl-D is in LEAVING
EXIT_WORDS = ("exit", "bye", "quit", "\x04")
SPECIAL = [
    "\x1b[A",
    "\x1b[B",
    "\x1b[C",
    "\x1b[D",
    "\x1b[H",
    "\x1b[F",
    "\t",
    "\t\t",
    "\x1b[Z",
    "\x1b\r",
    "\x1b[3~",
    "\x1b[5~",
    "\x1bb",
    "\x1bf",
    "\x1bd",
    "\x1b.",
    "\x1bOP",
    "\x1b[1;5D",
    "\x1b[M !!",
    "\x12",
]
WORDS = [
    "",
    "0",
    "1",
    "2",
    "-1",
    "7",
    "0.5",
    "1e9",
    "nan",
    "inf",
    "99999999999999999999",
    "on",
    "off",
    "all",
    "none",
    "x" * 300,
    "naïve",
    "日本",
    "\u202e",
    "a b",
    '"',
    "'",
    '""',
    "/",
    "//",
    "../..",
    "~",
    "~nobody",
    ".",
    "notes.txt",
    "out.md",
    "main",
    "{{ x }}",
    "<|user|>",
    "md",
    "json",
    "info",
    "temp",
    "top_k",
    "system",
    "\x00",
    "Once upon a time",
    "predict",
]


class Screen(io.StringIO):
    """The output of the REPL: a text buffer that acts as a terminal whose size can change."""

    size = Size(rows=24, columns=80)
    pipe: PipeInput | None = None  # answers cursor queries, so that the bottom line is drawn

    def write(self, text: str) -> int:
        if "\x1b[6n" in text and self.pipe:
            threading.Thread(
                target=self._answer_cursor_query, args=(self.pipe,), daemon=True
            ).start()  # the pipe may be full
        return super().write(text)

    def isatty(self) -> bool:
        return True

    def _answer_cursor_query(self, pipe: PipeInput) -> None:
        with suppress(OSError):  # it was closed in the meantime
            pipe.send_bytes(b"\x1b[1;1R")


class Typist(threading.Thread):
    """A thread that sends keys to the REPL's input, with random pauses. `repl_ended` is set by the
    main thread.
    """

    def __init__(
        self, keys: list[str], pipe: PipeInput, screen: Screen, rng: random.Random
    ) -> None:
        super().__init__(daemon=True)
        self.keys, self.pipe, self.screen, self.rng, self.repl_ended = (
            keys,
            pipe,
            screen,
            rng,
            threading.Event(),
        )

    def run(self) -> None:
        """Send all keys, then the end of a paste, Ctrl-C and Ctrl-D until the REPL ends."""
        with suppress(OSError):  # the REPL ended in the middle of a paste
            for key in self.keys:
                if self.repl_ended.is_set():
                    return
                self._press(key)
                if self.rng.random() < 0.4:
                    time.sleep(self.rng.random() ** 3 * 0.2)
            while not self.repl_ended.wait(0.1):
                self.pipe.send_bytes(
                    b"\x1b[201~\x03\x04"
                )  # a paste that was begun swallows all until its end

    def _press(self, key: str) -> None:
        if key == "INTERRUPT":
            os.kill(os.getpid(), signal.SIGINT)
        elif key == "RESIZE":
            self.screen.size = Size(rows=self.rng.randint(1, 60), columns=self.rng.randint(1, 200))
            os.kill(os.getpid(), signal.SIGWINCH)
        elif key == "TERMINATE":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            raw = key.encode("utf-8", "surrogatepass")
            for at in range(0, len(raw), 4096):
                self.pipe.send_bytes(raw[at : at + 4096])


class Fuzz:
    """The state of one run: the open model, the words and completions to type, and the counts."""

    def __init__(self, model: Path, seed: int, folder: Path) -> None:
        self.model, self.seed, self.folder, self.counts = model, seed, folder, Counter[str]()
        self.config = replace(config.load_config(), offline=True)
        self.ui = UI()
        options = RunOptions(ctx_size=512, threads=1, batch_size=64, ubatch_size=32)
        flags = RunFlags(options, {}, BeamSettings(), chat_template=TEMPLATE)
        self.models = ModelSwitcher(flags, self.config, self.ui, True)
        self.opened = self.models.open(str(model))
        self.words = [
            *WORDS,
            str(model),
            "./missing.gguf",
            str(folder),
            *commands.commands_by_word(),
        ]
        session = self._new_session(0, 0)
        self.completions = {
            word: self._completions(session, word)
            for word in commands.commands_by_word()
            if word not in EXIT_WORDS
        }

    def _completions(self, session: ChatSession, word: str) -> list[str]:
        """Return the completions of a command's arguments. /model gets only the model of this run,
        so that no other one is loaded.
        """
        first_words = [f"{first}" for _, first in complete_line(session, f"/{word} ")]
        two_words = [
            f"{first} {second}"
            for first in first_words
            for _, second in complete_line(session, f"/{word} {first} ")
        ]
        return [str(self.model)] if word == "model" else [*first_words, *two_words]

    def _new_session(self, temp: int, seed: int) -> ChatSession:
        sampling = default_sampling().with_values({"temp": temp, "seed": seed})
        return ChatSession(
            self.opened.name,
            LocalModel(self.opened.runner),
            Conversation(sampling, predict=24),
            self.config,
            self.ui,
            file_bytes=self.opened.file_bytes,
            models=self.models,
            measure_speed=measure,
        )

    def keys(self, rng: random.Random, count: int) -> list[str]:
        """Return a random sequence of at most `count` inputs (one may be added). An input is a key,
        a line, a paste, or one of the events "INTERRUPT", "RESIZE" and "TERMINATE".
        """
        kinds = {
            self._command: 10,
            self._message: 6,
            self._text: 4,
            self._fence: 1,
            self._paste: 1,
            lambda rng: rng.choice(CONTROL): 5,
            lambda rng: rng.choice(SPECIAL): 5,
            lambda rng: "\r": 4,
            lambda rng: "INTERRUPT": 4,
            lambda rng: "RESIZE": 2,
        }
        keys = [
            rng.choices(list(kinds), list(kinds.values()))[0](rng)
            for _ in range(rng.randint(1, count))
        ]
        if rng.random() < 0.05:
            long_text = "word and " * (1 << 17)  # more than 1 MB
            keys.insert(rng.randrange(len(keys) + 1), f"\x1b[200~{long_text}\x1b[201~\r")
        return [*keys, "TERMINATE"] if rng.random() < 0.05 else keys

    def _command(self, rng: random.Random) -> str:
        """Return a command line, in most cases with a valid argument."""
        word = rng.choice([*self.completions, "nonsense"])
        arguments = [rng.choice(self.words) for _ in range(rng.choice((0, 0, 1, 1, 2, 3)))]
        if word in self.completions and (choices := self.completions[word]) and rng.random() < 0.6:
            arguments[:1] = [rng.choice(choices)]
        if rng.random() < 0.1:
            word = rng.choice(EXIT_WORDS)
        line = f"/{word} {' '.join(arguments)}".replace("\x00", "")
        return (
            rng.choice(("\x05\x15", "\x05\x15", "")) + line + rng.choice(("\r", "\r", "\r", "\t"))
        )

    def _message(self, rng: random.Random) -> str:
        return (
            " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 12))).replace("\x00", "")
            + "\r"
        )

    def _text(self, rng: random.Random) -> str:
        codes = (
            rng.choice((rng.randint(32, 126), rng.randint(160, 0x2FFF)))
            for _ in range(rng.randint(1, 20))
        )
        return "".join(map(chr, codes))

    def _fence(self, rng: random.Random) -> str:
        return '"""' + self._text(rng) + rng.choice(("\r", '\rmore"""\r', '"""\r'))

    def _paste(self, rng: random.Random) -> str:
        text = self._text(rng) * rng.choice((1, 10, 1000))
        return "\x1b[200~" + text + "\n" + text + rng.choice(("\x1b[201~", "\x1b[201~\r", ""))

    def sequence(self, number: int, count: int) -> list[str]:
        """Type one sequence of keys in a new session and check the state afterwards; return the
        keys. Any failure raises an exception.
        """
        rng = random.Random(f"{self.seed}/{number}")
        keys, screen = self.keys(rng, count), Screen()
        self.screen, self.typed = screen, keys
        session = self._new_session(rng.choice((0, 1)), number)
        output = Vt100_Output(screen, lambda: screen.size, term="xterm")
        try:
            with create_pipe_input() as pipe, create_app_session(input=pipe, output=output):
                screen.pipe = pipe
                typist = Typist(keys, pipe, screen, rng)
                with redirect_stdout(screen), redirect_stderr(screen):
                    self._converse(session, typist)
            typist.join()
        finally:
            self.opened = replace(
                self.opened, name=session.name, runner=session.runner, file_bytes=session.file_bytes
            )
        self._check_state(session)
        return keys

    def _converse(self, session: ChatSession, typist: Typist) -> None:
        def ignore_signal(number: int, frame: FrameType | None) -> None:
            """Ignore Ctrl-C before the REPL starts and after it ends."""

        signal.signal(signal.SIGINT, ignore_signal)
        typist.start()
        try:
            repl.run_repl(session)
            self.counts["left"] += 1
        except SystemExit as error:
            if error.code != 128 + signal.SIGTERM:
                raise
            self.counts["terminated"] += 1
        finally:
            typist.repl_ended.set()

    def _check_state(self, session: ChatSession) -> None:
        engine = session.runner.engine
        assert not engine.is_busy, "an answer is unfinished"
        assert engine.ledger.n_idle == session.runner.context.n_seq_max, "a slot is still taken"
        engine.ledger.check()
        roles = [message.role for message in session.conversation.messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2), roles
        self.counts["turns"] += len(roles) // 2
        self.counts["errors told"] += self.screen.getvalue().count("error: ")
        assert "Traceback" not in self.screen.getvalue(), "a traceback on the screen"


def main() -> None:
    """Parse the flags, type all sequences and print the figures; exit with 1 on a failure."""
    parser = argparse.ArgumentParser(usage=(__doc__ or "").split("usage: ")[1].split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--keys", type=int, default=40, help="the most keys and lines of one sequence"
    )
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first sequence, to resume or repeat"
    )
    parser.add_argument("--verbose", action="store_true", help="print each sequence")
    args = parser.parse_args()
    model = args.model.resolve()
    clipboard.PROGRAMS = ()  # keep the user's clipboard
    began, n_keys = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LLMCLI_HOME"], home = str(Path(folder) / "home"), Path(folder) / "here"
        home.mkdir()
        os.chdir(home)
        (home / "notes.txt").write_text("A file of words.\n" * 3)
        fuzz = Fuzz(model, args.seed, home)
        for number in range(args.first, args.first + args.count):
            try:
                n_keys += len(fuzz.sequence(number, args.keys))
            except BaseException:  # noqa: BLE001 - reported below, then the run ends
                screen_text = escape_controls(fuzz.screen.getvalue())
                traceback_start = screen_text.find("Traceback")
                print(
                    screen_text[-2000:]
                    if traceback_start < 0
                    else screen_text[traceback_start : traceback_start + 4000],
                    file=sys.stderr,
                )
                shortened = [
                    key if len(key) < 80 else f"{key[:60]}… ({len(key)})" for key in fuzz.typed
                ]
                print(f"sequence {number} of seed {args.seed}: {shortened!r}", file=sys.stderr)
                traceback.print_exc()
                raise SystemExit(1) from None
            if args.verbose:
                print(
                    number,
                    f"{time.monotonic() - began:.0f} s",
                    dict(fuzz.counts),
                    file=sys.stderr,
                    flush=True,
                )
        fuzz.models.close()
    figures = {"sequences": args.count, "seed": args.seed, "keys": n_keys, **fuzz.counts}
    print(json.dumps({**figures, "seconds": round(time.monotonic() - began, 1)}))


if __name__ == "__main__":
    main()
