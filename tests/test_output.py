"""Commands whose standard streams are closed, on a full disk, or read by a program that exits
early. Output that cannot act on the terminal.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fixtures.cli import Done
from tests.quant import tiny_gguf

PROGRAM = f"{sys.executable} -m llmcli.app"
FULL = Path("/dev/full")


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash, in which `llmcli` means the program of this checkout. Assert that it
    prints no traceback.
    """
    line = f"set -o pipefail; {line.replace('llmcli', PROGRAM)}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    return done


@pytest.mark.parametrize("command", ["list --all", "list --all --json", "show smollm2:135m"])
def test_a_reader_that_exits_early_is_no_error(command: str) -> None:
    done = shell(f"llmcli {command} | true")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_exits_early_ends_an_answer(stories_gguf: Path) -> None:
    done = shell(f"llmcli run {stories_gguf} 'Once upon a time' -t 1 | head -c 4")
    assert done.returncode == 0
    assert len(done.stdout) == 4


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    "command", ["list --all", "list --all --json", "show smollm2:135m", "--version", "--help"]
)
def test_a_full_disk_is_one_error(command: str) -> None:
    done = shell(f"llmcli {command} > {FULL}")
    first, second = done.stderr.splitlines()
    assert done.returncode == 1
    assert first == "error: cannot write the output: No space left on device"
    assert second.startswith("hint: ")


def test_a_closed_stdin_is_an_empty_prompt(stories_gguf: Path) -> None:
    chat = shell(f"llmcli chat {stories_gguf} -t 1 <&-")
    assert (chat.returncode, chat.stdout) == (0, "")
    run = shell(f"llmcli run {stories_gguf} -t 1 <&-")
    assert run.returncode == 1
    assert run.stderr.startswith("error: the prompt is empty\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_output_to_a_closed_stream_is_discarded(
    stories_gguf: Path, closed: str, tmp_path: Path
) -> None:
    out = tmp_path / "out.gguf"
    assert shell(f"llmcli run {stories_gguf} Once -n 3 -t 1 {closed}").returncode == 0
    done = shell(f"llmcli quantize {stories_gguf} -o {out} {closed}")
    assert done.returncode == 0
    # The messages were not written to the file, which may have the number of a closed stream.
    assert shell(f"llmcli show {out} --json").returncode == 0


@pytest.mark.parametrize(
    "command",
    [
        "pull {}",
        "pull {} --q4_0",
        "run {} x --quant q8_0",
        "alias a smollm2:135m",
        "pull smollm2:135m",
    ],
)
def test_a_home_folder_that_cannot_be_written_is_one_error(
    command: str, stories_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("LLMCLI_HOME", str(tmp_path / "file" / "home"))
    done = shell("llmcli " + command.format(stories_gguf))
    first, second = [line for line in done.stderr.splitlines() if not line.startswith("checking")]
    assert done.returncode == 1
    assert first.startswith(f"error: cannot write {tmp_path}/file/home/")
    assert second.startswith("hint: ")


@pytest.mark.parametrize("settings", ["LC_ALL=C PYTHONUTF8=0", "LC_ALL=C", "LC_ALL=C.UTF-8"])
def test_words_and_names_are_read_in_every_locale(
    settings: str, stories_gguf: Path, tmp_path: Path
) -> None:
    model = tmp_path / "größe 名前.gguf"
    model.write_bytes(stories_gguf.read_bytes())
    done = shell(f"{settings} llmcli run '{model}' 'größe 名前 😀' --raw -n 1 -t 1 --json")
    expected = shell(f"llmcli run '{model}' 'größe 名前 😀' --raw -n 1 -t 1 --json")
    counts = [json.loads(run.stdout)["timing"]["prompt_tokens"] for run in (done, expected)]
    assert counts[0] == counts[1]
    missing = shell(f"{settings} llmcli show 名前.gguf")
    assert "no such file or folder: 名前.gguf" in missing.stderr


NAME, ADDRESS = "a-name/of-thirty-characters:Q4_0", "somewhere " * 5 + "far/" * 30


@pytest.mark.parametrize("columns", [None, 20, 40, 60, 80, 140])
def test_a_table_keeps_names_whole_and_cuts_nothing_off(
    columns: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from llmcli.ui import UI

    if columns:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True, raising=False)
    UI(color=False).table(
        ("name", "size", "source"), [(NAME, "12.5 GiB", ADDRESS), ("x", "1 B", "")], right=("size",)
    )
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert NAME in out
    assert "12.5 GiB" in out.replace("\n  ", " ")
    assert "…" not in out
    assert "".join(ADDRESS.split()) in "".join(
        "".join(line.replace(NAME, "").replace("12.5 GiB", "").split()) for line in lines
    )
    assert all(line == line.rstrip() for line in lines)
    if columns and columns > 40:
        assert max(map(len, lines)) <= columns
    if columns is None:
        assert len(lines) == 3


LITTLE_MEMORY = """
import sys
from llmcli.commands import models
def fail(*words, **options):
    raise {error}
models.start_command = fail
from llmcli.app import main
sys.argv = ["llmcli", "list"]
main()
"""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("MemoryError", "out of memory"),
        ("MemoryError('Unable to allocate 9 GiB')", "out of memory: Unable to allocate 9 GiB"),
        ("OSError(12, 'Cannot allocate memory')", "out of memory: Cannot allocate memory"),
    ],
)
def test_exhausted_memory_is_one_error(error: str, message: str) -> None:
    command = [sys.executable, "-c", LITTLE_MEMORY.format(error=error)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[0]) == (1, f"error: {message}")
    assert "ulimit -v unlimited" in done.stderr


HOSTILE = "x\x9b31m\u202ey\u2066z\u061c\x7f\x1b[2J"


@pytest.mark.parametrize(
    "words",
    [
        [HOSTILE],
        [f"--{HOSTILE}"],
        ["run", f"--{HOSTILE}"],
        ["run", HOSTILE, "a prompt"],
        ["list", HOSTILE],
        ["quantize", HOSTILE],
        ["quantize", "m.gguf", "--type", HOSTILE],
        ["bench", HOSTILE],
        ["show", HOSTILE, "--json"],
        ["batch", "m.gguf", HOSTILE, "-o", "o.jsonl"],
        ["eval", "m.gguf", "--text", HOSTILE],
        ["run", "m.gguf", "a", "--replay", HOSTILE],
        ["serve", "m.gguf", "--api-key-file", HOSTILE],
    ],
)
def test_words_of_a_command_line_cannot_act_on_the_terminal(
    words: list[str], llmcli: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_gguf.llama(Path("m.gguf"), hidden=64, ff=64, layers=1)
    done = llmcli(*words)
    assert done.code in (1, 2)
    assert "31m" in done.err
    assert not set(HOSTILE) - set("x31myz[2J") & set(done.out + done.err)


def test_names_in_tables_and_documents_cannot_act_on_the_terminal(
    llmcli: Callable[..., Done], tmp_path: Path
) -> None:
    path = tiny_gguf.llama(tmp_path / f"{HOSTILE}.gguf", hidden=64, ff=64, layers=1)
    for words in (["show"], ["show", "--json"], ["plan"], ["plan", "--json"]):
        done = llmcli(words[0], str(path), *words[1:])
        assert done.code == 0, done.err
        assert not set(HOSTILE) - set("x31myz[2J") & set(done.out + done.err), words


def test_a_document_keeps_names_of_files_that_are_not_utf8(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from llmcli.ui import UI

    document = {"path": "/models/a\udcff\u202e\x9b.gguf"}
    UI(json=True).result(document)
    out = capsys.readouterr().out
    assert out.isascii()
    assert json.loads(out) == document
