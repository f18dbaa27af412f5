"""`llmcli pull`, `list`, `show`, `rm`, `gc` and `alias`."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from llmcli.config import load_config
from llmcli.units import format_size
from quant.model_file import read_header

REPO = "someone/Tiny-GGUF"
IDENTITY = ["name", "path", "bytes", "sha256", "source", "revision"]
FACTS = [
    "architecture",
    "parameters",
    "file_type",
    "bits_per_weight",
    "context_length",
    "tokenizer",
    "has_template",
]


@dataclass(frozen=True)
class Done:
    """The exit code, stdout and stderr of a command."""

    code: int
    out: str
    err: str

    @property
    def document(self):
        """stdout parsed as JSON."""
        return json.loads(self.out)


@pytest.fixture
def llmcli(monkeypatch, capsys) -> Callable[..., Done]:
    """Return a function that runs one command line in this process."""

    def call(*words: str) -> Done:
        from llmcli.app import main

        monkeypatch.setattr(sys, "argv", ["llmcli", *words])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            main()
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return Done(exit_info.value.code or 0, out, err)

    return call


@pytest.fixture
def published(hub, gguf):
    """A hub with one repository of two GGUF files."""
    hub.add(REPO, {"tiny-Q4_K_M.gguf": gguf, "tiny-Q8_0.gguf": gguf + bytes(32)})
    return hub


def test_pull_json_has_the_documented_keys(published, llmcli, gguf):
    done = llmcli("pull", REPO, "--json")
    assert done.code == 0
    assert list(done.document) == IDENTITY
    assert done.document["sha256"] == hashlib.sha256(gguf).hexdigest()
    assert done.document["revision"] == published.repos[REPO].commit
    assert Path(done.document["path"]).read_bytes() == gguf


def test_list_and_show_json_have_the_documented_keys(published, llmcli):
    llmcli("pull", REPO)
    (row,) = llmcli("list", "--json").document
    assert list(row) == IDENTITY + FACTS
    shown = llmcli("show", REPO, "--json").document
    assert list(shown) == [*IDENTITY, *FACTS, "types", "roles", "certificate"]
    assert {key: shown[key] for key in row} == row
    header = read_header.read_header(Path(row["path"]))
    assert row["parameters"] == sum(tensor.elements for tensor in header.tensors)
    assert sum(kind["tensors"] for kind in shown["types"].values()) == len(header.tensors)


def test_the_printed_show_has_its_sections(published, llmcli):
    llmcli("pull", REPO)
    out = llmcli("show", REPO).out
    assert [line for line in out.splitlines() if line and not line.startswith(" ")] == [
        "Model",
        "Types",
        "Roles",
        "Tokenizer",
        "License",
    ]
    assert "llama" in out


def test_show_of_an_absent_model_names_its_source(llmcli):
    done = llmcli("show", "smollm2:135m-hf")
    assert "hub:HuggingFaceTB/SmolLM2-135M-Instruct" in done.out
    assert "to fetch it: llmcli pull smollm2:135m-hf" in done.out
    document = llmcli("show", "smollm2:135m", "--json").document
    assert (document["path"], document["bytes"], document["architecture"]) == (None, 98362432, None)


def test_show_of_a_checkpoint_counts_its_tensors(stories, llmcli):
    shown = llmcli("show", str(stories), "--json").document
    assert (shown["architecture"], shown["file_type"], shown["bits_per_weight"]) == (
        "LlamaForCausalLM",
        "F32",
        32.0,
    )
    assert shown["parameters"] * 4 == sum(kind["bytes"] for kind in shown["types"].values())
    assert 250_000 < shown["parameters"] < 300_000


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", "[" * 100_000),
        ("config.json", '{"architectures": [["x"]]}'),
        ("config.json", '{"architectures": ["\\ud800"]}'),
        ("config.json", '{"max_position_embeddings": NaN}'),
        ("config.json", '{"max_position_embeddings": {"a": 1}}'),
        ("tokenizer_config.json", '{"tokenizer_class": [1]}'),
        ("tokenizer_config.json", '{"tokenizer_class": "\\udfff"}'),
        ("model.safetensors", "[" * 100_000),
        ("model.safetensors", '{"a": {"dtype": "\\ud800", "shape": [2]}}'),
        (
            "model.safetensors",
            '{"a": {"dtype": "F32", "shape": [' + "999999999999999999," * 5000 + "1]}}",
        ),
    ],
)
def test_invalid_metadata_of_a_checkpoint_is_tolerated(stories, tmp_path, llmcli, file, text):
    folder = shutil.copytree(stories, tmp_path / "odd")
    head = len(text).to_bytes(8, "little") if file.endswith(".safetensors") else b""
    (folder / file).write_bytes(head + text.encode())
    assert llmcli("pull", str(folder)).code == 0
    for words in (
        ("list",),
        ("list", "--json"),
        ("show", str(folder)),
        ("show", str(folder), "--json"),
    ):
        assert llmcli(*words).code == 0


def test_an_empty_list_suggests_a_command(llmcli):
    assert "llmcli pull smollm2:135m" in llmcli("list").out
    assert llmcli("list", "--json").document == []


def test_list_ends_with_the_total_in_which_an_alias_counts_once(published, llmcli):
    llmcli("pull", f"{REPO}:Q8_0")
    llmcli("alias", "mine", f"{REPO}:Q8_0")
    (row, alias) = llmcli("list", "--json").document
    assert alias["path"] == row["path"]
    last = llmcli("list").out.splitlines()[-1]
    assert last == f"1 model on this disk: {format_size(row['bytes'])}"


def test_list_all_names_the_catalog(llmcli):
    out = llmcli("list", "--all").out
    assert "smollm2:135m" in out
    assert "not on disk" in out


def test_a_model_whose_file_is_missing_is_left_out_of_the_list(published, llmcli):
    llmcli("pull", REPO)
    llmcli("pull", f"{REPO}:Q8_0")
    Path(llmcli("show", REPO, "--json").document["path"]).unlink()
    done = llmcli("list", "--json")
    assert [row["name"] for row in done.document] == [f"{REPO}:Q8_0"]
    assert f"{REPO}: " in done.err


def test_pull_quantizes_a_checkpoint_of_the_hub(hub, stories, llmcli):
    hub.add("someone/stories", stories)
    done = llmcli("pull", "someone/stories", "--q8_0", "--keep-source", "--json")
    assert done.code == 0
    assert done.document["name"] == "someone/stories:Q8_0"
    assert read_header.read_header(Path(done.document["path"])).file_type == "Q8_0"
    hub.requests.clear()
    second_pull = llmcli("pull", "someone/stories", "--quant", "q8_0", "--json")
    assert second_pull.document == done.document
    assert hub.requests == []
    assert [row["name"] for row in llmcli("list", "--json").document] == [
        "someone/stories",
        "someone/stories:Q8_0",
    ]
    assert llmcli("show", "someone/stories:q8_0", "--json").document["file_type"] == "Q8_0"
    assert llmcli("rm", "someone/stories:Q8_0").code == 0
    assert not Path(done.document["path"]).exists()
    assert [row["name"] for row in llmcli("list", "--json").document] == ["someone/stories"]


def test_rm_reports_the_freed_bytes(published, llmcli, gguf):
    path = Path(llmcli("pull", REPO, "--json").document["path"])
    done = llmcli("rm", REPO)
    assert done.code == 0
    assert "KiB freed" in done.out
    assert not path.exists()
    assert llmcli("rm", REPO).code == 1


def test_gc_dry_run_deletes_nothing(llmcli):
    junk = load_config().cache / "downloads" / "p-1.0" / "p.whl"
    junk.parent.mkdir(parents=True)
    junk.write_bytes(b"12345")
    assert llmcli("gc", "--dry-run", "--json").document == {
        "freed_bytes": 5,
        "dry_run": True,
        "items": [{"path": str(junk.parent), "bytes": 5, "why": "downloaded wheel"}],
    }
    assert junk.exists()
    assert "5 B freed" in llmcli("gc").out
    assert not junk.exists()
    assert llmcli("gc").out == "nothing to free\n"


def test_an_alias_has_a_system_prompt_and_settings(published, llmcli):
    llmcli("pull", REPO)
    done = llmcli(
        "alias", "mine", REPO, "--system", "Be brief.", "--temp", "0.2", "--set", "top-k=5"
    )
    assert done.code == 0
    out = llmcli("show", "mine").out
    assert "Be brief." in out
    assert "top_k=5 temp=0.2" in out
    assert "no longer an alias" in llmcli("rm", "mine").out
    assert len(llmcli("list", "--json").document) == 1


def test_an_alias_is_listed_when_its_model_is_on_disk(published, llmcli):
    llmcli("alias", "mine", REPO)
    assert llmcli("list", "--json").document == []
    (row,) = [row for row in llmcli("list", "--all", "--json").document if row["name"] == "mine"]
    assert (row["path"], row["source"]) == (None, f"alias:{REPO}")
    llmcli("pull", REPO)
    model, alias = llmcli("list", "--json").document
    assert alias == {**model, "name": "mine", "source": f"alias:{REPO}"}
    assert [row["name"] for row in llmcli("list", "--all", "--json").document].count("mine") == 1


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (["pull", "smolm2:135m"], 1, "no model called 'smolm2:135m'"),
        (["pull", "./none.gguf"], 1, "no such file or folder: ./none.gguf"),
        (["pull", "smollm2:135m", "--quant", "Q4_KM"], 1, "Q4_KM"),
        (["pull", "smollm2:135m", "--q4_k", "--q8_0"], 2, "several types given"),
        (
            ["pull", "smollm2:135m", "--source", "hub"],
            1,
            "has no source of kind 'hub'; its kinds: wheel",
        ),
        (["pull", "smollm2:135m", "--revision", "v1"], 1, "have no revisions"),
        (["pull", "smollm2:135m", "--offline"], 1, "llmcli is offline"),
        (["pull", "a/b", "--offline"], 1, "llmcli is offline"),
        (["rm", "smollm2:135m"], 1, "smollm2:135m is not on this disk"),
        (["alias", "a b", "smollm2:135m"], 1, "is not a valid name"),
        (["alias", "a", "smollm2:135m", "--temp", "-1"], 1, "temp must be from 0 to 100"),
        (["alias", "a", "smollm2:135m", "--set", "top_k"], 2, "is not a setting"),
    ],
)
def test_invalid_arguments_are_one_error_and_one_hint(llmcli, words, code, error):
    done = llmcli(*words)
    assert done.code == code
    assert done.out == ""
    lines = done.err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["error", "hint"]
    assert error in lines[0]


def test_a_file_that_is_not_a_model_is_an_error(tmp_path, llmcli):
    (tmp_path / "x.gguf").write_bytes(b"no model")
    for command in ("pull", "show"):
        done = llmcli(command, str(tmp_path / "x.gguf"))
        assert done.code == 1
        assert done.err.startswith("error: ")
    assert llmcli("list", "--json").document == []


def test_file_names_of_the_hub_are_printed_without_escape_sequences(hub, gguf, llmcli):
    hub.add(REPO, {"evil\x1b[2J-Q8_0.gguf": gguf, "b-Q8_0.gguf": gguf})
    done = llmcli("pull", f"{REPO}:Q8_0")
    assert done.code == 0
    assert "1 file left out" in done.out + done.err
    assert "\x1b" not in done.out + done.err


def test_a_full_disk_is_an_error_and_the_next_pull_resumes(published, gguf, llmcli):
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000));"
        f"sys.argv = ['llmcli', 'pull', {REPO!r}]; from llmcli.app import main; main()"
    )
    env = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 1
    assert "error: cannot write" in done.stderr
    assert "Traceback" not in done.stderr
    assert Path(llmcli("pull", REPO, "--json").document["path"]).read_bytes() == gguf
    assert published.gets("tiny-Q4_K_M.gguf")[-1] == "bytes=20000-"


def test_ctrl_c_exits_with_130_and_the_next_pull_resumes(published, gguf, llmcli):
    published.gate = threading.Event()
    child = subprocess.Popen(
        [sys.executable, "-m", "llmcli.app", "pull", REPO],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert published.reached.wait(120)
    blobs = load_config().hub_cache / "models--someone--Tiny-GGUF" / "blobs"
    arrived, pause = threading.Event(), threading.Event()

    def watch() -> None:  # waits until the first half of the file is on the disk
        while not any(path.stat().st_size for path in blobs.glob("*.incomplete")):
            pause.wait(0.01)
        arrived.set()

    threading.Thread(target=watch, daemon=True).start()
    assert arrived.wait(120)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=120)
    assert child.returncode == 130
    assert "Traceback" not in errors
    published.gate.set()
    published.gate = None
    assert Path(llmcli("pull", REPO, "--json").document["path"]).read_bytes() == gguf
    assert published.gets("tiny-Q4_K_M.gguf")[-1].startswith("bytes=")
