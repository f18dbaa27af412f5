"""`run --json` is a receipt, and `run --replay` repeats the run or says what differs."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmcli.catalog import file_hashes
from llmcli.chat import receipt
from llmcli.runtime.drafting.draft_files.heads_file import MEDUSA, HeadShapes
from llmcli.runtime.sampling import sampling_settings
from tests.fixtures.cli import Done
from tests.fixtures.draft_heads import write_heads
from tests.quant import tiny_gguf

Llmcli = Callable[..., Done]
RUN = ("Once upon a time", "-n", "12", "-t", "1", "-c", "256")


@pytest.fixture
def record(llmcli: Llmcli, stories_gguf: Path, tmp_path: Path) -> Callable[..., Path]:
    """A function that runs stories260K with some options and returns the file of its document."""

    def run(*options: str) -> Path:
        done = llmcli("run", str(stories_gguf), *RUN, *options, "--json")
        assert done.code == 0, done.err
        path = tmp_path / "receipt.json"
        path.write_text(done.out)
        return path

    return run


def edit(path: Path, **changes: Any) -> Path:
    """Change values of a receipt. The keys are paths such as `request__flags__threads`."""
    document = json.loads(path.read_text())
    for name, value in changes.items():
        table, keys = document, name.split("__")
        for key in keys[:-1]:
            table = table[key]
        table[keys[-1]] = value
    path.write_text(json.dumps(document))
    return path


def test_the_document_has_all_that_decides_the_tokens(
    record: Callable[..., Path], stories_gguf: Path
) -> None:
    document = json.loads(record("--top-k", "20", "-sys", "Be brief.").read_text())
    assert set(document["settings"]) == set(sampling_settings())
    assert (document["settings"]["top_k"], document["settings"]["temp"]) == (20, 0.8)
    assert document["settings"]["seed"] == document["seed"] >= 0
    assert set(document["build"]) == {"llmcli", "llama_cpp_python", "cpu_features", "libraries"}
    assert set(document["machine"]) == {"cpu", "cores", "gpus"}
    assert document["request"]["prompt"] == "Once upon a time"
    flags = document["request"]["flags"]
    assert (flags["threads"], flags["ctx_size"], flags["predict"]) == (1, 256, 12)
    assert flags["system"] == "Be brief."
    assert flags["gpu_layers"] in ("0", "all")
    assert document["model"]["sha256"] == hashlib.sha256(stories_gguf.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--temp", "1.5", "-s", "7"),
        ("--temp", "0", "-sys", "A tale.", "-r", "the"),
        ("--samples", "3"),
        ("--beams", "3"),
        ("--raw", "--ignore-eos", "--endless"),
        ("-ctk", "bf16", "-ctv", "bf16", "-b", "64", "-ub", "32"),
        ("-j", '{"enum": ["yes", "no", "perhaps so"]}'),
        ("--grammar", 'root ::= "a" [b-z]+', "--jump", "off"),
        ("-l", "30+4", "--dry-multiplier", "0.8", "--repeat-penalty", "1.1"),
        ("--chat-template", "{% for m in messages %}{{ m.content }}{% endfor %}"),
        ("--ngram-draft", "on"),
    ],
    ids=lambda options: " ".join(options)[:30],
)
def test_a_replay_gives_the_same_tokens(
    options: tuple[str, ...], record: Callable[..., Path], llmcli: Llmcli
) -> None:
    path = record(*options)
    recorded = json.loads(path.read_text())
    done = llmcli("run", "--replay", str(path), "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["replay"] == {"same": True, "first_difference": None, "differences": []}
    assert [token["id"] for token in document["tokens"]] == [
        token["id"] for token in recorded["tokens"]
    ]
    assert document["request"] == recorded["request"]
    done = llmcli("run", "--replay", str(path))
    assert done.code == 0
    assert "replay: the same " in done.err
    assert "differs" not in done.err


def test_a_run_with_draft_heads_is_replayed(llmcli: Llmcli, tmp_path: Path) -> None:
    model = tiny_gguf.llama(tmp_path / "m.gguf", hidden=64, layers=1, tied=True)
    heads, path = tmp_path / "h.gguf", tmp_path / "receipt.json"
    write_heads(heads, HeadShapes(MEDUSA, 64, 300, 4, 1, 0, False), model)
    path.write_text(llmcli("run", str(model), *RUN, "--raw", "-md", str(heads), "--json").out)
    document = json.loads(path.read_text())
    flags = document["request"]["flags"]
    assert (flags["draft"], flags["model_draft"]) == (MEDUSA, str(heads))
    assert (document["draft"]["method"], document["draft"]["model"]) == (MEDUSA, str(heads))
    done = llmcli("run", "--replay", str(path))
    assert (done.code, "replay: the same" in done.err, "differs" in done.err) == (0, True, False)


@pytest.mark.model
def test_a_reproducible_run_is_replayed(llmcli: Llmcli, smollm2: Path, tmp_path: Path) -> None:
    words = ("run", str(smollm2), *RUN, "--raw", "--reproducible", "--temp", "2")
    path = tmp_path / "receipt.json"
    path.write_text(llmcli(*words, "--json").out)
    done = llmcli("run", "--replay", str(path))
    assert (done.code, "replay: the same" in done.err, "differs" in done.err) == (0, True, False)


def test_a_replay_says_exactly_what_differs(
    record: Callable[..., Path], llmcli: Llmcli, stories_gguf: Path, tmp_path: Path
) -> None:
    path = edit(
        record("--temp", "0"),
        build__llama_cpp_python="0.0.1",
        machine__cpu="another CPU",
        model__sha256="0" * 64,
    )
    tokens = json.loads(path.read_text())["tokens"]
    tokens[3]["id"] += 1
    edit(path, tokens=tokens)
    done = llmcli("run", "--replay", str(path), "-ub", "16")
    assert done.code == 1
    assert (
        f"replay: token 4 is {tokens[3]['text']!r} ({tokens[3]['id'] - 1}) instead of" in done.err
    )
    for difference in (
        "differs: model.sha256 ",
        "differs: build.llama_cpp_python ",
        "differs: machine.cpu ",
        "differs: ubatch_size 16 instead of 512",
    ):
        assert difference in done.err
    document = json.loads(llmcli("run", "--replay", str(path), "--json").out)["replay"]
    assert (document["same"], document["first_difference"]["index"]) == (False, 3)
    assert {row["name"] for row in document["differences"]} == {
        "model.sha256",
        "build.llama_cpp_python",
        "machine.cpu",
    }


def test_a_shorter_answer_differs_at_its_end(record: Callable[..., Path], llmcli: Llmcli) -> None:
    path = record("--temp", "0")
    done = llmcli("run", "--replay", str(path), "-n", "5")
    assert done.code == 1
    assert "replay: token 6 is the end instead of " in done.err
    assert "differs: predict 5 instead of 12" in done.err


def test_another_file_may_be_named(
    record: Callable[..., Path], llmcli: Llmcli, stories_gguf: Path, tmp_path: Path
) -> None:
    path = record("--temp", "0")
    moved = shutil.copyfile(stories_gguf, tmp_path / "moved.gguf")
    assert llmcli("run", "--replay", str(path), str(moved)).code == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "is no receipt of a run"),
        ("[1", "is no receipt of a run"),
        ('{"model": {"name": "x"}}', "is no receipt of a run"),
        (None, "cannot read"),
    ],
)
def test_a_file_that_is_no_receipt_is_one_error(
    text: str | None, message: str, llmcli: Llmcli, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "x.json").write_text(text)
    done = llmcli("run", "--replay", str(tmp_path / "x.json"))
    assert (done.code, message in done.err) == (1, True)
    assert "llmcli run REF PROMPT --json > FILE" in done.err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"request__flags__rpc": "evil:1"}, "receipt.json: rpc 'evil:1'"),
        ({"request__flags__trust": True}, "receipt.json: trust"),
        ({"request__flags__file": "/etc/passwd"}, "receipt.json: file"),
        ({"request__flags__threads": "many"}, "receipt.json: threads 'many'"),
        ({"request__flags__threads": True}, "receipt.json: threads"),
        ({"request__flags__ctx_size": -5}, "receipt.json: --ctx-size is -5"),
        ({"request__flags__cache_type_v": "x"}, "receipt.json: unknown KV cache type 'x'"),
        ({"settings__temp": "hot"}, "temp is 'hot'"),
        ({"settings__nothing": 1}, "receipt.json: nothing"),
        ({"settings__top_k": ["a"]}, "top_k"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_receipt_of_a_stranger_sets_only_what_decides_the_tokens(
    changes: dict[str, Any], message: str, record: Callable[..., Path], llmcli: Llmcli
) -> None:
    done = llmcli("run", "--replay", str(edit(record(), **changes)))
    assert (done.code, message in done.err) == (1, True), done.err


def test_a_replay_takes_no_prompt(record: Callable[..., Path], llmcli: Llmcli) -> None:
    path = record()
    for words in (("x", "a prompt"), ("-p", "a prompt"), ("--skeleton",)):
        done = llmcli("run", "--replay", str(path), *words)
        assert (done.code, "--replay repeats the prompt of its file" in done.err) == (2, True)


def test_an_answer_is_printed_even_if_the_model_file_is_gone(
    llmcli: Llmcli, stories_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hash_files(*values: Any) -> str:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(stories_gguf))

    monkeypatch.setattr(file_hashes, "hash_files", hash_files)
    done = llmcli("run", str(stories_gguf), *RUN, "--json")
    document = json.loads(done.out)
    assert (done.code, document["model"]["sha256"]) == (0, None)
    assert document["text"]
    assert "sha256 is missing: its file cannot be read: No such file" in " ".join(done.err.split())


def test_a_long_value_that_differs_is_shortened() -> None:
    names = ("settings", "build", "machine")
    document: dict[str, Any] = {
        "model": {"name": "m", "path": "/m.gguf"},
        "tokens": [],
        **{name: {} for name in names},
        "request": {"prompt": "p", "flags": {"chat_template": "x" * 5000}},
    }
    replayed = receipt.parse_receipt(document)
    document["request"]["flags"]["chat_template"] = "y" * 5000
    (line,) = receipt.compare_runs(receipt.parse_receipt(document), replayed).describe()[1:]
    assert line.startswith("differs: chat_template 'xxx")
    assert len(line) < 300
