"""README.md and docs/: the examples work, the links resolve, and the generated page is current.

The comment before a console block determines how it is tested (docs/contributing.md):

    <!-- run -->               every command is run and must succeed
    <!-- run: exits 1 -->      every command is run; the last one must exit with 1
    <!-- parsed: reason -->    the commands and options must exist; running them is too expensive
    <!-- plugin test -->       a pytest command, run in a copy of the tree with the page's plug-ins

The runnable blocks of a page run in one folder, one after another. Catalog names and the files of
MODELS and CHECKPOINTS are a trained model of 1 MB there, and the files of TEXTS contain TEXT.
"""

import importlib.util
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(
    r"(?ms)^(?:<!-- (?P<mark>[^\n]*) -->\n)?```(?P<language>[^\n]*)\n(?P<text>.*?)^```$"
)
MARK = re.compile(r"run|run: exits (?P<code>\d)|parsed: .+|plugin test")
PORT = 8080
CATALOG = ("smollm2:135m", "gemma3:270m")
MODELS = ("model-f16.gguf", "original.gguf")
CHECKPOINTS = ("checkpoint", "stories")
TEXT = "The ferry leaves at eight, and on Sundays at ten. Once upon a time there was a ship. "
TEXTS = {"notes.txt": 1, "wiki.txt": 100, "mytext.txt": 100}  # a file, and how often it has TEXT
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
ENTRY = """\
[models."{name}"]
[[models."{name}".sources]]
kind = "local"
path = "{path}"
"""
PROGRAMS = {"cat", "cd", "curl", "echo", "pip", "printf", "source", "ssh"}
READY_SECONDS, COMMAND_SECONDS = 60, 180


@dataclass(frozen=True)
class Command:
    """A command line of an example. `typed`: the lines that are typed into it after ">>> ".
    `printed`: the lines of output below it.
    """

    line: str
    typed: list[str] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Block:
    """A fenced code block of a page. `line`: its line number. `mark`: the comment before it."""

    page: Path
    line: int
    language: str
    mark: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def is_run(self) -> bool:
        return self.mark.startswith("run")

    @property
    def exit_code(self) -> int:
        match = MARK.fullmatch(self.mark)
        return int(match["code"] or 0) if match else 0

    def commands(self) -> list[Command]:
        commands: list[Command] = []
        lines = iter(self.text.splitlines())
        for line in lines:
            if line.startswith("$ "):
                while line.endswith("\\"):
                    line = line[:-1] + next(lines).strip()
                commands.append(Command(line[2:]))
            elif line.startswith(">>> "):
                commands[-1].typed.append(line[4:])
            else:
                commands[-1].printed.append(line)
        return commands


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page,
            text.count("\n", 0, fence.start("language")) + 1,
            fence["language"],
            fence["mark"] or "",
            fence["text"],
        )
        for fence in FENCE.finditer(text)
    ]


def name(page: Path) -> str:
    return page.stem


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_of_commands_is_marked(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("```") == 2 * len(blocks(page)), "a fence is not at the beginning of a line"
    for block in blocks(page):
        assert block.language in {"console", "json", "python", "text", "toml"}, block
        if block.language == "console":
            assert MARK.fullmatch(block.mark), (
                f"{block}: neither <!-- run --> nor <!-- parsed: … -->"
            )
            assert block.text.startswith("$ "), f"{block} does not begin with a command"
        else:
            assert not re.search(r"(?m)^\$ ", block.text), f"{block}: commands outside a console"


@pytest.mark.parametrize(
    "block",
    [block for page in PAGES for block in blocks(page) if block.language == "console"],
    ids=str,
)
def test_every_command_parses(block: Block) -> None:
    for command in block.commands():
        for words in simple_commands(command.line):
            parse(words)


def simple_commands(line: str) -> Iterator[list[str]]:
    """Yield the words of each command in a shell line, without redirections and assignments of
    variables.
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = "#"
    words: list[str] = []
    is_file = False
    for word in [*lexer, "|"]:
        if is_file or set(word) <= set("<>"):
            is_file = not is_file
        elif set(word) <= set("|;&<>"):
            while words and re.match(r"\w+=", words[0]):
                del words[0]
            if words:
                yield words
            words = []
        else:
            words.append(word)


def parse(words: list[str]) -> None:
    """Raise an exception if the program, a subcommand or an option does not exist. `words`: the
    words of one command.
    """
    program, *arguments = words
    if program == "ssh" and "llmcli" in arguments:
        program, *arguments = arguments[arguments.index("llmcli") :]
    if program == ".venv/bin/python":
        program, *arguments = arguments
    if program == "llmcli":
        parse_llmcli(arguments)
    elif program.startswith("scripts/"):
        text = (ROOT / program).read_text(encoding="utf-8")
        options = [word.partition("=")[0] for word in arguments if word.startswith("--")]
        assert [option for option in options if option not in text] == []
    else:
        assert program in PROGRAMS


def parse_llmcli(words: list[str]) -> None:
    import typer

    from llmcli.commands.cli import app

    with suppress(typer.Exit):  # --help and the like
        parse_command(typer.main.get_command(app), "llmcli", words, None)


def parse_command(command: Any, label: str, words: list[str], parent: Any) -> None:
    context = command.make_context(label, words, parent=parent)
    if hasattr(command, "list_commands") and (
        remaining := [*context._protected_args, *context.args]
    ):
        label, subcommand, words = command.resolve_command(context, remaining)
        parse_command(subcommand, label, words, context)


def test_the_parser_of_examples_finds_mistakes() -> None:
    from typer.exceptions import TyperException

    from llmcli.errors import UsageError

    parse_llmcli(["bench", "x", "-p", "3"])
    parse_llmcli(["sessions", "show", "x"])
    parse_llmcli(["list"])
    for words in (["run", "--tempo", "1"], ["bench", "load", "--users", "3"], ["chit"], ["rm"]):
        with pytest.raises((TyperException, UsageError)):
            parse_llmcli(words)
    assert list(simple_commands("A=1 llmcli run x 'a | b' | cat > f # c")) == [
        ["llmcli", "run", "x", "a | b"],
        ["cat"],
    ]


@pytest.fixture(scope="module")
def models(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the small model as a checkpoint, in F16 and in Q8_0, with a chat template."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(stories, folder / "checkpoint")
    (folder / "checkpoint" / "chat_template.jinja").write_text(TEMPLATE)
    for words in (
        ["convert", "checkpoint", "-o", "f16.gguf", "--outtype", "f16"],
        ["quantize", "checkpoint", "-o", "q8_0.gguf", "--q8_0"],
    ):
        subprocess.run(
            [sys.executable, "-m", "llmcli.app", *words],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "LLMCLI_HOME": str(folder / "home")},
            check=True,
            capture_output=True,
        )
    return folder


@pytest.fixture
def stage(models: Path, home: Path, tmp_path: Path) -> Path:
    """A folder with the files that examples read. Next to it is a folder `bin` with the program
    llmcli. In the user's catalog, every name of CATALOG is the small model.
    """
    folder = tmp_path / "stage"
    folder.mkdir()
    for model in MODELS:
        shutil.copy(models / "f16.gguf", folder / model)
    for checkpoint in CHECKPOINTS:
        shutil.copytree(models / "checkpoint", folder / checkpoint)
    for file, times in TEXTS.items():
        (folder / file).write_text(TEXT * times)
    (home / "config").mkdir()
    (home / "config" / "models.toml").write_text(
        "".join(ENTRY.format(name=word, path=models / "q8_0.gguf") for word in CATALOG)
    )
    program = tmp_path / "bin" / "llmcli"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m llmcli.app "$@"\n')
    program.chmod(0o755)
    return folder


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(block.is_run for block in blocks(page))], ids=name
)
def test_the_examples_of_a_page_run(page: Path, stage: Path) -> None:
    runner = ExampleRunner(stage)
    try:
        for block in blocks(page):
            if block.is_run:
                runner.run(block)
    finally:
        runner.stop_server()


class ExampleRunner:
    """Runs code blocks in one folder. A server runs until the next one starts, or until
    `stop_server`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server: subprocess.Popen[bytes] | None = None
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.environment = os.environ | {
            "PATH": f"{folder.parent / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "NO_COLOR": "1",
        }

    def run(self, block: Block) -> None:
        if block.language == "python":
            code = block.text.replace(str(PORT), str(self.port))
            self.execute([sys.executable, "-c", code], "", 0, str(block))
            return
        commands = block.commands()
        for command in commands:
            code = block.exit_code if command is commands[-1] else 0
            self.run_command(command, code, f"{block}: {command.line}")

    def run_command(self, command: Command, code: int, where: str) -> None:
        line = command.line.replace(str(PORT), str(self.port))
        if line.startswith("cat ") and command.printed:
            (self.folder / line.split()[1]).write_text("\n".join(command.printed) + "\n")
        if line.startswith("curl ") and not shutil.which("curl"):
            return
        if line.startswith("llmcli serve "):
            self.start_server(f"{line} --port {self.port}", where)
            return
        typed = "".join(f"{words}\n" for words in command.typed)
        self.execute(["bash", "-c", f"set -o pipefail; {line}"], typed, code, where)

    def execute(self, command: list[str], typed: str, code: int, where: str) -> None:
        done = subprocess.run(
            command,
            input=typed,
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=self.environment,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        output = f"{where}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        assert done.returncode == code, output
        assert "Traceback" not in done.stderr, output
        if typed:
            assert "error: " not in done.stdout + done.stderr, output

    def start_server(self, line: str, where: str) -> None:
        self.stop_server()
        self.server = subprocess.Popen(
            ["bash", "-c", f"exec {line}"],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + READY_SECONDS
        while True:
            try:
                # It listens a moment before it handles signals; an answer shows that it does.
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                return
            except OSError:
                assert self.server.poll() is None, f"{where} ended with {self.server.returncode}"
                assert time.monotonic() < deadline, f"{where} is not ready"
                time.sleep(0.1)

    def stop_server(self) -> None:
        if self.server is not None:
            self.server.terminate()
            assert self.server.wait(timeout=READY_SECONDS) == 0
            self.server = None


CONTRIBUTING = ROOT / "docs" / "contributing.md"
PLUGIN = re.compile(r'plugin: (?P<target>\S+) (from (?P<source>\S+)|after "(?P<line>.+)")')
# The example of a block format is Q8_0, which must be removed from the tree before.
WITHOUT_Q8_0 = '\nFORMATS = tuple(known for known in FORMATS if known.name != "Q8_0")\n'


@pytest.fixture(scope="module")
def tree_with_plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree by symbolic links, with the plug-ins of docs/contributing.md."""
    folder = tmp_path_factory.mktemp("tree")
    for name in ("quant", "llmcli", "tests", "scripts"):
        shutil.copytree(
            ROOT / name,
            folder / name,
            copy_function=os.symlink,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    for name in ("models.toml", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    edit(folder / "quant" / "formats" / "legacy.py", lambda text: text + WITHOUT_Q8_0)
    for block in blocks(CONTRIBUTING):
        match = PLUGIN.fullmatch(block.mark)
        if match and match["source"]:
            assert not (folder / match["target"]).exists(), block
            (folder / match["target"]).write_text(block.text, encoding="utf-8")
        elif match:
            line = f"{match['line']}\n"
            edit(folder / match["target"], partial(insert_after, line, block.text))
    return folder


def edit(path: Path, change: Callable[[str], str]) -> None:
    """Replace a symbolic link by a changed copy of its file."""
    text = path.read_text(encoding="utf-8")
    path.unlink()
    path.write_text(change(text), encoding="utf-8")


def insert_after(line: str, addition: str, text: str) -> str:
    assert text.count(line) == 1, line
    return text.replace(line, line + addition)


@pytest.mark.parametrize(
    "block",
    [block for block in blocks(CONTRIBUTING) if block.mark == "plugin test"],
    ids=lambda block: block.commands()[0].line.split()[-1],
)
def test_the_example_plug_ins_work(block: Block, tree_with_plugins: Path) -> None:
    (command,) = block.commands()
    program, *arguments = shlex.split(command.line)
    assert program == "scripts/test"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *arguments],
        cwd=tree_with_plugins,
        env=os.environ | {"PYTHONPATH": str(tree_with_plugins)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command.line}\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}"


def test_the_example_plug_ins_are_current() -> None:
    """If it fails, run scripts/build/plugin_examples.py."""
    page = CONTRIBUTING.read_text(encoding="utf-8")
    assert script("plugin_examples").insert_examples(page) == page


def test_readme_is_short_and_names_every_command() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    rows = "\n".join(line for line in text.splitlines() if line.startswith("| `"))
    reference = script("cli_reference")
    missing = [
        command
        for command, command_object in reference.all_commands()
        if command
        and not hasattr(command_object, "list_commands")
        and f"`{readme_name(command)}`" not in rows
    ]
    assert missing == []


def readme_name(command: str) -> str:
    """Return the name under which the README lists a command."""
    return {"bench speed": "bench", "sessions show": "sessions", "sessions rm": "sessions"}.get(
        command, command
    )


@pytest.mark.parametrize("page", PAGES[1:], ids=name)
def test_a_page_begins_with_its_audience(page: Path) -> None:
    title, first, *_ = page.read_text(encoding="utf-8").split("\n\n")
    assert title.startswith("# ")
    assert " is for people " in first


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_paths_in_a_page_exist(page: Path) -> None:
    """Paths are in code spans. In architecture.md they may be relative to llmcli/."""
    text = page.read_text(encoding="utf-8")
    plugins = {match["target"] for match in PLUGIN.finditer(text)}
    paths = {*re.findall(r"`((?:quant|llmcli|scripts|tests|docs)/[\w./-]+)`", text)} - plugins
    if page.stem == "architecture":
        steps = re.findall(r"`((?:api|chat|runtime|serve)/[\w./-]+)`", text)
        paths |= {f"llmcli/{path}" for path in steps}
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_changelog_is_short() -> None:
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()) <= 60


def test_the_command_reference_is_current() -> None:
    """If it fails, run scripts/build/cli_reference.py."""
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert script("cli_reference").build_page() == page


def test_the_list_of_api_fields_is_current() -> None:
    """If it fails, run scripts/build/api_fields.py."""
    page = (ROOT / "docs" / "api-fields.md").read_text(encoding="utf-8")
    assert script("api_fields").build_page() == page


def script(stem: str) -> ModuleType:
    path = ROOT / "scripts" / "build" / f"{stem}.py"
    spec = importlib.util.spec_from_file_location(stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation() -> None:
    site = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))
    listed = sorted(leaves(site["project"]["nav"]))
    assert listed == sorted(page.name for page in PAGES if page.parent.name == "docs")


def leaves(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for child in entry.values() if isinstance(entry, dict) else entry:
            yield from leaves(child)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A link to a page or heading that does not exist fails the build."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "zensical.toml", folder)
    program = Path(sys.executable).with_name("zensical")
    done = subprocess.run(
        [program, "build", "--strict"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


class Page(HTMLParser):
    """Parses an HTML page. `loaded`: URLs of everything that it loads. `anchors`: ids in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attrs}
        self.anchors.add(values.get("id", ""))
        if tag != "a" and values.get("rel") != "canonical":
            self.loaded += [values[key] for key in ("src", "href") if key in values]


def test_the_site_loads_nothing_from_other_hosts(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) >= len(PAGES) - 1
    for page in pages:
        assert [address for address in Page(page).loaded if "//" in address] == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?https?:|@import", sheet.read_text()), sheet


def test_the_links_of_the_readme_exist(site: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        assert (ROOT / path).exists(), target
        if anchor:
            assert anchor in Page(site / f"{Path(path).stem}.html").anchors, target
