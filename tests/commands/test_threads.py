"""`-t` means threads in every command and every script; quantize also takes a file type, with a note."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.commands.test_help import COMMANDS
from tests.fixtures.cli import Done
from tests.quant import tiny_gguf

Llmcli = Callable[..., Done]
SCRIPTS = Path(__file__).parents[2] / "scripts"
# Words that each command needs besides -t. No file of these names exists.
WORDS = {
    "calibrate": ("x.gguf", "-o", "y.gguf"),
    "run": ("x.gguf", "hi"),
    "batch": ("x.gguf", "y.jsonl"),
    "bench compare": ("x.gguf", "y.gguf"),
    "worker": (),
}


def threads_options() -> dict[str, Any]:
    """Return the option -t of each command that has one, by the command's name."""
    return {
        name.removeprefix("llmcli "): parameter
        for name, command, context in COMMANDS
        for parameter in command.get_params(context)
        if "-t" in (*parameter.opts, *parameter.secondary_opts)
    }


@pytest.mark.parametrize("name", sorted(threads_options()))
def test_t_is_threads(name: str) -> None:
    option = threads_options()[name]
    assert option.opts == ["-t", "--threads"]
    assert option.help.lower().startswith("threads")


def test_every_command_with_threads_takes_t() -> None:
    long_names = {
        name.removeprefix("llmcli ")
        for name, command, context in COMMANDS
        for parameter in command.get_params(context)
        if "--threads" in parameter.opts
    }
    assert long_names == set(threads_options())
    assert {"quantize", "convert", "calibrate", "eval", "run", "worker"} <= long_names


@pytest.mark.parametrize("word", ["x", "1.5", "Q4_K_X"])
@pytest.mark.parametrize("name", sorted(threads_options()))
def test_a_word_that_is_no_number_of_threads_is_one_line(
    name: str, word: str, llmcli: Llmcli, tmp_path: Path
) -> None:
    tiny_gguf.llama(tmp_path / "x.gguf", hidden=64, ff=64, layers=1)
    words = [
        str(tmp_path / text) if text == "x.gguf" else text for text in WORDS.get(name, ("x.gguf",))
    ]
    # bench speed is the default of bench
    done = llmcli(*name.removesuffix(" speed").split(), *words, "-t", word)
    error, hint = done.err.splitlines()
    assert done.code in (1, 2)
    assert error.startswith("error: ")
    assert "-t" in error
    assert hint.startswith("hint: ")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["x.gguf"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_gguf.llama(tmp_path / "model.gguf", hidden=256, ff=256, layers=1)


@pytest.mark.parametrize(
    ("flags", "file_type"),
    [
        (("-t", "Q8_0"), "Q8_0"),
        (("-t", "q4_k"), "Q4_K_M"),
        (("-tQ6_K",), "Q6_K"),
        (("-t", "1", "-t", "Q5_0"), "Q5_0"),
        (("-t", "1", "--type", "Q8_0"), "Q8_0"),
        (("-t1", "--q8_0"), "Q8_0"),
        (("-t", "1"), "Q4_K_M"),
    ],
)
def test_quantize_takes_a_type_by_t_with_a_note(
    flags: tuple[str, ...], file_type: str, llmcli: Llmcli, model: Path
) -> None:
    done = llmcli("quantize", str(model), "-o", str(model) + ".new", "--dry-run", "--json", *flags)
    assert done.code == 0, done.err
    assert json.loads(done.out)["file_type"] == file_type
    is_type_by_t = any(re.match(r"(-t)?[Qq]\d", word) for word in flags) and "--type" not in flags
    assert ("is read as --type" in done.err) == is_type_by_t


@pytest.mark.parametrize(
    ("flags", "message", "hint"),
    [
        (("-t", "x"), "-t is 'x': neither a number of threads nor a file type", "--type Q4_K_M"),
        (("-t", "q8_9"), "-t is 'q8_9': neither", "-t 8 sets the threads, --type Q8_0 the type"),
        (("-t=2",), "-t is '=2'", "-t 8"),
        (("-t", ""), "-t is ''", "-t 8"),
        (("-t", "--dry-run"), "'-t' / '--threads'", "--help"),
        (("-t", "-1"), "'-t' / '--threads'", "--help"),
        (("-t", "513"), "'-t' / '--threads'", "--help"),
        (("-t", "Q8_0", "--q4_0"), "several types given", "once for each type"),
        (("--threads", "Q8_0"), "'-t' / '--threads'", "--help"),
    ],
)
def test_quantize_refuses_other_words(
    flags: tuple[str, ...], message: str, hint: str, llmcli: Llmcli, model: Path
) -> None:
    done = llmcli("quantize", str(model), "-o", str(model) + ".new", *flags)
    assert done.code == 2
    assert message in done.err
    assert hint in done.err.splitlines()[-1]
    assert not Path(str(model) + ".new").exists()


def test_t_is_threads_in_scripts() -> None:
    texts = {path: path.read_text() for path in SCRIPTS.rglob("*.py")}
    others = [
        (path.name, match[1])
        for path, text in texts.items()
        for match in re.finditer(r'add_argument\(\s*"-t",\s*"([^"]*)"', text)
        if match[1] != "--threads"
    ]
    assert others == []
    types = [
        path.name
        for path, text in texts.items()
        if re.search(r'(?<![\w-])-t[ "\',]+(Q\d|IQ\d|B?F\d\d|args\.type|TYPE)', text)
    ]
    assert types == []
