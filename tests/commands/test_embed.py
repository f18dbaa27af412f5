"""`llmcli embed`: the server's vectors, in the order of the lines, also after a killed run."""

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.runner import open_runner
from tests.fixtures.cli import Done
from tests.fixtures.server import serving
from tests.runtime import bert

Llmcli = Callable[..., Done]
TEXTS = ["hello world", "the cat", "cats", "hello the cat sat on a mat", "a", "world"]
# Runs llmcli, and kills it with SIGKILL when its journal has got this many lines.
KILLED_RUN = """
import os, signal, sys
from llmcli.batch.journal import BatchJournal
count, append = int(sys.argv.pop(1)), BatchJournal.append
def killing_append(journal, index, line):
    append(journal, index, line)
    if journal.n_finished == count:
        os.kill(os.getpid(), signal.SIGKILL)
BatchJournal.append = killing_append
from llmcli.app import main
main()
"""


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    """A tiny BERT with mean pooling."""
    return bert.bert(tmp_path / "bert.gguf")


def write_texts(path: Path, texts: list[str] = TEXTS) -> str:
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return str(path)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def read_vectors(path: Path) -> np.ndarray:
    return np.array([row["embedding"] for row in read_rows(path)])


def post(model: Path, *bodies: dict[str, Any], path: str = "/v1/embeddings") -> list[Any]:
    """Return the answers of a server to these bodies."""
    options = RunOptions(ctx_size=64, threads=1)
    with (
        open_runner(model, options, native_sampling=False, needs_text=False) as runner,
        serving(runner) as served,
    ):
        return [httpx.post(served.url + path, json=body, timeout=60).json() for body in bodies]


def kill_and_resume(llmcli: Llmcli, count: int, words: tuple[str, ...], out: Path) -> None:
    """Kill a run after `count` lines, and run it again to its end. Check that no finished line is
    computed again.
    """
    killed = subprocess.run(
        (sys.executable, "-c", KILLED_RUN, str(count), *words, "-o", str(out)),
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert not out.exists()
    done = llmcli(*words, "-o", str(out), "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert (document["resumed_lines"], document["finished"]) == (count, True)
    assert not list(out.parent.glob(f".{out.name}*"))


def test_vectors_are_those_of_the_server(llmcli: Llmcli, encoder: Path, tmp_path: Path) -> None:
    source, out = write_texts(tmp_path / "in.txt"), tmp_path / "out.jsonl"
    plain, short, prompted = post(
        encoder,
        {"input": TEXTS},
        {"input": TEXTS, "dimensions": 8},
        {"input": [f"the {text}" for text in TEXTS]},
    )
    raw = post(encoder, {"input": TEXTS, "embd_normalize": -1}, path="/embedding")[0]
    words = ("embed", str(encoder), source, "-o", str(out), "-t", "1", "-c", "64")
    for options, expected in (
        ((), [item["embedding"] for item in plain["data"]]),
        (("--dimensions", "8"), [item["embedding"] for item in short["data"]]),
        (("--prompt", "the "), [item["embedding"] for item in prompted["data"]]),
        (("--embd-normalize", "-1"), [item["embedding"][0] for item in raw]),
    ):
        done = llmcli(*words, *options)
        assert done.code == 0, done.err
        np.testing.assert_allclose(read_vectors(out), expected, atol=1e-5)
    assert [row["custom_id"] for row in read_rows(out)] == [f"line-{n}" for n in range(1, 7)]


def test_a_mean_equals_that_of_transformers(llmcli: Llmcli, tmp_path: Path) -> None:
    torch, oracle = pytest.importorskip("torch"), bert.oracle()
    model = bert.bert(tmp_path / "bert.gguf", 1, oracle)
    out = tmp_path / "out.npy"
    source = write_texts(tmp_path / "in.txt", ["hello world", "the cat"])
    done = llmcli("embed", str(model), source, "-o", str(out), "-t", "1", "-fa", "off")
    assert done.code == 0, done.err
    for found, ids in zip(np.load(out), ([2, 5, 6, 3], [2, 7, 8, 3]), strict=True):
        with torch.no_grad():
            mean = oracle(torch.tensor([ids])).last_hidden_state[0].mean(0).numpy()
        np.testing.assert_allclose(found, mean / np.linalg.norm(mean), atol=1e-4)


def test_a_npy_file_has_the_same_vectors_and_nan_for_errors(
    llmcli: Llmcli, encoder: Path, tmp_path: Path
) -> None:
    texts = [TEXTS[0], "cat " * 100, *TEXTS[1:]]
    source, lines, matrix = (
        write_texts(tmp_path / "in.txt", texts),
        tmp_path / "o",
        tmp_path / "o.npy",
    )
    words = ("embed", str(encoder), source, "-t", "1", "-c", "64")
    for out in (lines, matrix):
        done = llmcli(*words, "-o", str(out))
        assert done.code == 1
        assert "line 2: the text is too large: it has 1" in done.err
        assert "1 of 7 lines have no vector" in done.err
    rows, vectors = read_rows(lines), np.load(matrix, mmap_mode="r")
    assert vectors.shape == (7, bert.HIDDEN) and vectors.dtype == np.float32
    assert np.isnan(vectors[1]).all()
    assert (rows[1]["error"]["line"], rows[1]["custom_id"]) == (2, "line-2")
    for row in (0, 2, 3, 4, 5, 6):
        np.testing.assert_array_equal(np.float32(rows[row]["embedding"]), vectors[row])
    about = json.loads((tmp_path / "o.npy.json").read_text())
    assert (about["rows"], about["values"], about["pooling"]) == (7, bert.HIDDEN, "mean")
    assert [(error["row"], error["error"]["line"]) for error in about["errors"]] == [(1, 2)]
    done = llmcli(*words, "-o", str(matrix))
    assert done.code == 1 and "already complete" in done.out
    matrix.write_bytes(matrix.read_bytes()[:-1] + b"x")
    assert "already complete" not in llmcli(*words, "-o", str(matrix)).out


@pytest.mark.parametrize("suffix", ["jsonl", "npy"])
def test_a_killed_run_resumes_to_the_same_bytes(
    llmcli: Llmcli, stories_gguf: Path, tmp_path: Path, suffix: str
) -> None:
    texts = [f"Once upon a time {'there was a cat ' * (n * 37 % 11)}{n}" for n in range(120)]
    words = ("embed", str(stories_gguf), write_texts(tmp_path / "in.txt", texts), "-t", "1")
    whole = tmp_path / f"whole.{suffix}"
    assert llmcli(*words, "-o", str(whole)).code == 0
    for count in (1, 21, 119):
        out = tmp_path / f"out{count}.{suffix}"
        kill_and_resume(llmcli, count, words, out)
        assert out.read_bytes() == whole.read_bytes()


def test_other_input_or_options_do_not_resume_an_unfinished_run(
    llmcli: Llmcli, encoder: Path, tmp_path: Path
) -> None:
    source, out = write_texts(tmp_path / "in.txt"), tmp_path / "out.jsonl"
    words = ("embed", str(encoder), source, "-t", "1")
    subprocess.run(
        (sys.executable, "-c", KILLED_RUN, "2", *words, "-o", str(out)),
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    other = bert.bert(tmp_path / "other.gguf", 1, bert.oracle(5))
    for changed, message in (
        ((*words, "--prompt", "the "), "prompt"),
        ((*words, "--dimensions", "4"), "dimensions null then, 4 now"),
        (("embed", str(other), source, "-t", "1"), "model"),
        (
            ("embed", str(encoder), write_texts(tmp_path / "b.txt", ["a"]), "-t", "1"),
            "another input",
        ),
    ):
        done = llmcli(*changed, "-o", str(out))
        assert done.code == 1
        assert message in done.err and "--force starts again" in done.err
    assert llmcli(*words, "--prompt", "the ", "-o", str(out), "--force").code == 0


def test_a_long_text_is_cut_only_with_truncate(
    llmcli: Llmcli, encoder: Path, tmp_path: Path
) -> None:
    source, out = write_texts(tmp_path / "in.txt", ["hello " * 100, "cat"]), tmp_path / "out"
    words = ("embed", str(encoder), source, "-o", str(out), "-t", "1", "-c", "64")
    assert llmcli(*words).code == 1
    done = llmcli(*words, "--truncate")
    assert done.code == 0 and "texts cut to 64 tokens: 1" in done.err
    first, second = read_rows(out)
    assert (first["truncated"], first["prompt_tokens"]) == (True, 64)
    assert "truncated" not in second
    (answer,) = post(encoder, {"input": "hello " * 100, "truncate_prompt_tokens": -1})
    np.testing.assert_allclose(first["embedding"], answer["data"][0]["embedding"], atol=1e-5)


def test_lines_may_be_json_or_text_of_several_files(
    llmcli: Llmcli, encoder: Path, tmp_path: Path
) -> None:
    lines = [
        '"hello world"',
        "",
        '{"text": "the cat", "custom_id": "b", "title": "x"}',
        "{bad",
        "[5]",
        '{"title": "x"}',
        '{"text": 5}',
    ]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    source = write_texts(tmp_path / "b.txt", ["  cats ", "\u2028"])
    out = tmp_path / "out"
    files = (str(tmp_path / "a.jsonl.gz"), source, "-")
    done = llmcli(
        *("embed", str(encoder), *files, "-o", str(out), "-t", "1"), stdin=b"hello world\n\xff\n"
    )
    assert done.code == 1
    rows = read_rows(out)
    errors = {row["custom_id"]: row["error"] for row in rows if "error" in row}
    names = [row["custom_id"] for row in rows]
    assert names[:2] == [f"{files[0]}:line-1", "b"] and len(rows) == 10
    assert [error["line"] for error in errors.values()] == [4, 5, 6, 7, 2]
    assert errors["stdin:line-2"]["code"] == "invalid_json_line"
    assert "6 of" not in done.err and "5 of 10 lines have no vector" in done.err
    assert "1 blank line skipped" in done.err and "fields without an effect: title" in done.err
    assert f"{files[0]} line 4" in done.err
    assert f"{files[0]} line 5: it must be text or an object" in done.err
    np.testing.assert_allclose(rows[0]["embedding"], rows[8]["embedding"], atol=1e-5)


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (("-o", "o"), "embed needs a model, input files", "embed REF FILE..."),
        (("IN",), "embed needs a model, input files", "-o OUT.jsonl"),
        (("IN", "-o", "IN"), "the output file is the input file", "another name"),
        (("IN", "-o", "OUT", "--dimensions", "33"), "--dimensions is 33", "takes 1 to 32"),
        (("IN", "-o", "OUT", "--pooling", "x"), "--pooling is 'x'", "none, mean"),
        (("IN", "-o", "OUT", "--format", "csv"), "--format is 'csv'", "auto, jsonl, text"),
        (("IN", "-o", "OUT.npy", "--pooling", "none"), "a vector for each token", ".jsonl"),
        (
            ("IN", "-o", "OUT", "--dimensions", "4", "--embd-normalize", "-1"),
            "--dimensions scales vectors to length 1",
            "leave out one",
        ),
        (("JSON", "-o", "OUT"), "looks like JSONL", "--format jsonl"),
        (("ABOUT", "-o", "OUT.npy", "--format", "text"), "is the input file", "another name"),
        (("-", "-", "-o", "OUT"), "given twice", "once"),
    ],
)
def test_mistakes_have_a_hint(
    llmcli: Llmcli,
    encoder: Path,
    tmp_path: Path,
    words: tuple[str, ...],
    message: str,
    hint: str,
) -> None:
    names = {
        "IN": write_texts(tmp_path / "in.txt"),
        "JSON": write_texts(tmp_path / "in.json.txt", ['{"text": "a"}']),
        "ABOUT": write_texts(tmp_path / "out.npy.json"),
        "OUT": str(tmp_path / "out"),
        "OUT.npy": str(tmp_path / "out.npy"),
    }
    done = llmcli("embed", str(encoder), *(names.get(word, word) for word in words))
    assert done.code in (1, 2)
    assert message in done.err and hint in done.err
    assert not (tmp_path / "out").exists()


def test_vectors_of_tokens_are_written_as_lists(
    llmcli: Llmcli, encoder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    source = write_texts(tmp_path / "in.txt", ["hello world"])
    done = llmcli("embed", str(encoder), source, "-o", str(out), "--pooling", "none", "-t", "1")
    assert done.code == 0, done.err
    assert np.array(read_rows(out)[0]["embedding"]).shape == (4, bert.HIDDEN)
    done = llmcli("embed", str(encoder), source, "-o", str(out), "--pooling", "none", "-t", "1")
    assert done.code == 0 and "already complete" in done.out
