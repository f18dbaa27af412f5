"""Text files as other programs write them: with a byte-order mark, Windows line ends, in UTF-16 or in
Latin-1.

A line of texts.jsonl is a text, its encoding, and the text that a prompt has from it, or the error
and its hint. A line of documents.jsonl is an option, or a kind of file, and a text for it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.cli import Done
from tests.fixtures.fakes import BOS, EOS

Llmcli = Callable[..., Done]
FOLDER = Path(__file__).parent / "files"
TEXTS, DOCUMENTS = (
    [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]
    for name in ("texts.jsonl", "documents.jsonl")
)


class Recorder:
    """A fake model's answer that ends at once, and records the prompt."""

    prompt = b""

    def __call__(self, tokens: list[int]) -> int:
        self.prompt = bytes(token for token in tokens if token < BOS)
        return EOS


def assert_result(done: Done, case: dict[str, Any], name: str) -> None:
    """Check the exit code and the error of a command for a text in the file `name`."""
    lines = [line for line in done.err.splitlines() if line.startswith(("error: ", "hint: "))]
    if "error" in case:
        assert done.code == 1
        error, hint = lines
        assert error.startswith(f"error: {name} {case['error']}")
        assert case["hint"] in hint
    else:
        assert (done.code, lines) == (0, []), done.err


@pytest.mark.parametrize("source", ["-f", "-f -", "stdin", "-sysf"])
@pytest.mark.parametrize("case", TEXTS, ids=lambda case: case["name"])
def test_text_is_read_or_its_encoding_is_named(
    case: dict[str, Any], source: str, fake: Callable[..., Any], llmcli: Llmcli, tmp_path: Path
) -> None:
    recorder, file = Recorder(), tmp_path / "text.txt"
    fake(recorder, n_ctx=512)
    raw = case["text"].encode(case["encoding"])
    file.write_bytes(raw)
    words = {
        "-f": ["-f", str(file)],
        "-f -": ["-f", "-"],
        "stdin": [],
        "-sysf": ["Hi", "-sysf", str(file)],
    }[source]
    done = llmcli("run", "x", *words, "-n", "4", stdin=raw)
    assert_result(done, case, "stdin" if source in ("-f -", "stdin") else str(file))
    if "reads" in case:
        assert case["reads"].encode() in recorder.prompt
        assert recorder.prompt.count(b"\xef\xbb\xbf") == case["reads"].count("\ufeff")
        assert recorder.prompt.count(b"\r") == case["reads"].count("\r")


ENCODINGS = [
    {"encoding": "utf-8-sig"},
    {"encoding": "utf-16", "error": "is UTF-16 text", "hint": "iconv -f UTF-16 -t UTF-8"},
    {"encoding": "utf-32", "error": "is UTF-32 text", "hint": "iconv -f UTF-32 -t UTF-8"},
]


@pytest.mark.parametrize("case", ENCODINGS, ids=lambda case: case["encoding"])
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document["option"])
def test_file_of_an_option_is_read_or_its_encoding_is_named(
    document: dict[str, str],
    case: dict[str, Any],
    home: Path,
    stories_gguf: Path,
    llmcli: Llmcli,
    tmp_path: Path,
) -> None:
    option, file = document["option"], tmp_path / "document"
    if option == "models.toml":
        file = home / "config" / "models.toml"
        file.parent.mkdir()
        words = ["list", "--all"]
    elif option == "batch":
        words = [
            "batch",
            str(stories_gguf),
            str(file),
            "-o",
            str(tmp_path / "out.jsonl"),
            "-n",
            "1",
        ]
    else:
        words = ["run", str(stories_gguf), "Hi", option, str(file), "-n", "40", "-t", "1"]
    file.write_bytes(document["text"].encode(case["encoding"]))
    done = llmcli(*words)
    assert_result(done, case, str(file))
    if option == "models.toml":
        assert ("mine" in done.out) == (not done.code)
