"""`llmcli quantize` and `convert` through llama.cpp's converter, of which a stand-in runs."""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmcli import file_lock
from llmcli.catalog import cleanup
from llmcli.config import load_config
from llmcli.model_loader.llama_converter import converter_classes
from llmcli.model_loader.llama_converter.run_converter import ConverterRequest, hold_scratch_folder
from quant.model_file import load_checks, read_header
from tests.fixtures.fake_hub import Hub
from tests.quant import tiny_checkpoint, upstream
from tests.quant.upstream import tensor_contents

UNKNOWN_CLASS = "LLaMAForCausalLM"  # the converter's spelling, of which llmcli has no family


@pytest.fixture
def folder(stories: Path, tmp_path: Path) -> Path:
    """A checkpoint of a class that only the converter knows."""
    (tmp_path / "models").mkdir()
    folder = shutil.copytree(stories, tmp_path / "models" / "tiny")
    tiny_checkpoint.edit(folder / "config.json", architectures=[UNKNOWN_CLASS])
    return folder


def leftovers() -> list[Path]:
    """Return what conversions have left in the cache."""
    return list((load_config().cache / "conversions").rglob("*"))


def calls(converter: Path) -> int:
    """Return how often the converter was started."""
    file = converter / "calls"
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_an_unknown_class_is_converted_by_llama_cpp_and_quantized(
    llmcli: Any, folder: Path, converter: Path, stories_gguf: Path, tmp_path: Path
) -> None:
    done = llmcli("quantize", str(folder), "--q8_0", "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["converter"] == "llama.cpp"
    out = folder.with_name("tiny-Q8_0.gguf")
    assert document["path"] == str(out)
    load_checks.check_loadable(read_header.read_header(out))
    other = tmp_path / "other.gguf"
    assert llmcli("quantize", str(stories_gguf), "--q8_0", "-o", str(other)).code == 0
    assert tensor_contents(out) == tensor_contents(other)
    metadata = read_header.read_header(out).metadata
    assert metadata["llmcli.convert.converter"] == "llama.cpp (another)"
    assert str(converter).encode() not in out.read_bytes()
    assert f"because llmcli itself has no {UNKNOWN_CLASS}" in done.err
    assert "it writes a temporary copy in F32 first: 1.0 MiB on disk and about" in done.err
    assert "llama.cpp has loaded tiny and computed finite numbers with it" in done.err
    assert leftovers() == []


def test_a_finished_file_is_recognized_before_weights_are_converted(
    llmcli: Any, folder: Path, converter: Path
) -> None:
    assert llmcli("quantize", str(folder), "--q8_0").code == 0
    done = llmcli("quantize", str(folder), "--q8_0")
    assert done.code == 0
    assert "nothing to do" in done.err
    assert "convert tiny" not in done.err
    tensors = tiny_checkpoint.read(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2
    tiny_checkpoint.save(folder / "model.safetensors", tensors)
    assert "convert tiny" in llmcli("quantize", str(folder), "--q8_0").err


def test_a_dry_run_converts_no_weights_and_has_the_exact_size(
    llmcli: Any, folder: Path, converter: Path
) -> None:
    done = llmcli("quantize", str(folder), "--q4_0", "--dry-run", "--json")
    assert done.code == 0, done.err
    assert "it writes a temporary copy" in done.err
    assert "convert tiny" not in done.err
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]
    assert leftovers() == []
    expected = json.loads(done.out)["bytes"]
    assert json.loads(llmcli("quantize", str(folder), "--q4_0", "--json").out)["bytes"] == expected


def test_convert_writes_the_type_of_the_checkpoint(
    llmcli: Any, folder: Path, converter: Path, stories_gguf: Path
) -> None:
    done = llmcli("convert", str(folder), "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert (document["converter"], document["file_type"]) == ("llama.cpp", "F32")
    assert tensor_contents(Path(document["path"])) == tensor_contents(stories_gguf)
    assert "--outtype f32" in (converter / "calls").read_text()


def test_the_converter_can_be_chosen(
    llmcli: Any, stories: Path, converter: Path, tmp_path: Path
) -> None:
    out = tmp_path / "x.gguf"
    words = ("quantize", str(stories), "--q8_0", "-o", str(out), "--json", "--converter")
    done = llmcli(*words, "llama.cpp")
    assert (done.code, calls(converter)) == (0, 1), done.err
    assert "because --converter says so" in done.err
    done = llmcli(*words, "native", "--force")
    assert json.loads(done.out)["converter"] == "native"
    done = llmcli(*words, "auto", "--force")
    assert (json.loads(done.out)["converter"], calls(converter)) == ("native", 1)


def test_native_refuses_an_unknown_class(llmcli: Any, folder: Path, converter: Path) -> None:
    done = llmcli("quantize", str(folder), "--converter", "native")
    assert done.code == 1
    assert f"is a {UNKNOWN_CLASS}; supported are" in done.err
    assert calls(converter) == 0


def test_a_class_that_neither_knows_is_one_line(llmcli: Any, folder: Path, converter: Path) -> None:
    tiny_checkpoint.edit(folder / "config.json", architectures=["LamaForCausalLM"])
    done = llmcli("quantize", str(folder))
    assert done.code == 1
    lines = done.err.strip().splitlines()
    assert "which neither llmcli nor llama.cpp's converter" in lines[0]
    assert "the nearest is LlamaForCausalLM" in lines[0]
    assert lines[1:] == ["hint: pull a GGUF of this model instead"]
    assert calls(converter) == 0


@pytest.mark.parametrize(
    ("behavior", "message", "shown"),
    [
        ("fails early", "failed on {folder}: ValueError: Missing tensor ␛[31mmodel.norm", 1),
        ("fails half way", "failed on {folder}: RuntimeError: shape mismatch", 1),
        ("runs code", "can only be read by Python code of its own, which llmcli never runs", 0),
        ("imports", "needs the module a_module_that_is_missing, which is not installed", 0),
        ("disk is full", "the disk of the cache is full, so tiny cannot be converted", 0),
        ("is killed", "the memory was probably used up", 0),
        ("talks", "failed on {folder}: WARNING: line 19999", 1),
        ("writes nothing", "has written 0 files for tiny, not one", 0),
        ("nan", "llama.cpp computes NaN or infinite numbers with tiny.gguf", 0),
    ],
)
def test_a_failure_is_explained_and_leaves_nothing(
    llmcli: Any, folder: Path, converter: Path, behavior: str, message: str, shown: int
) -> None:
    (folder / "behavior").write_text(behavior)
    done = llmcli("quantize", str(folder), "--q8_0")
    assert done.code == 1
    *lines, error, hint = done.err.strip().splitlines()
    assert error.startswith("error: ")
    assert message.format(folder=folder) in error
    assert hint.startswith("hint: ")
    assert any(line.startswith("  ") for line in lines) == bool(shown)
    assert "\x1b" not in done.err
    assert "Writing:" not in done.err
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]
    assert leftovers() == []
    assert not (converter / "ran").exists()


def test_the_class_of_transformers_replaces_code_of_the_checkpoint(
    llmcli: Any, folder: Path, converter: Path
) -> None:
    (folder / "behavior").write_text("has code")
    assert llmcli("quantize", str(folder), "--q8_0").code == 0


def test_the_converter_makes_no_connection(llmcli: Any, folder: Path, converter: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        (folder / "behavior").write_text(f"connects {server.getsockname()[1]}")
        done = llmcli("quantize", str(folder), "--q8_0")
        assert done.code == 1
        assert "must not use the network" in done.err
        with pytest.raises(BlockingIOError):
            server.accept()


def test_a_converter_that_does_not_stop_at_its_header_is_used(
    llmcli: Any, folder: Path, converter: Path
) -> None:
    (folder / "behavior").write_text("never stops")
    done = llmcli("quantize", str(folder), "--q8_0")
    assert done.code == 0, done.err
    assert leftovers() == []


def test_missing_packages_are_one_line(
    llmcli: Any, folder: Path, converter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "llmcli.model_loader.llama_converter.run_converter.PACKAGES",
        ("json", "not_there", "nor_this"),
    )
    done = llmcli("quantize", str(folder))
    assert (done.code, done.err) == (
        1,
        "error: llama.cpp's converter needs not_there, nor_this, which are not installed\n"
        "hint: pip install 'llmcli[convert]'\n",
    )


def test_options_of_the_other_converter_are_refused(
    llmcli: Any, folder: Path, converter: Path, stories: Path, stories_gguf: Path
) -> None:
    done = llmcli("quantize", str(folder), "--tokenizer", str(stories))
    assert (done.code, "--tokenizer does not apply" in done.err) == (2, True)
    done = llmcli("quantize", str(stories_gguf), "--converter", "llama.cpp")
    assert (done.code, "--converter applies to checkpoint folders" in done.err) == (2, True)


def test_a_vocabulary_that_differs_from_the_tokenizer_is_refused_before_the_weights(
    llmcli: Any, folder: Path, converter: Path
) -> None:
    values = json.loads((folder / "tokenizer.json").read_text())
    values["model"]["merges"] = values["model"]["merges"][::-1]
    (folder / "tokenizer.json").write_text(json.dumps(values))
    done = llmcli("quantize", str(folder), "--q8_0")
    assert done.code == 1
    assert "llama.cpp would encode text differently" in done.err
    assert "convert tiny" not in done.err


def test_damaged_weights_are_found_before_the_converter_runs(
    llmcli: Any, folder: Path, converter: Path
) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    done = llmcli("quantize", str(folder), "--q8_0")
    assert (done.code, calls(converter)) == (1, 0)
    assert str(file) in done.err
    file.unlink()
    done = llmcli("quantize", str(folder), "--q8_0")
    assert (done.code, calls(converter)) == (1, 0)
    assert "has neither model.safetensors nor" in done.err


def test_pickled_weights_need_allow_pickle(llmcli: Any, folder: Path, converter: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    done = llmcli("quantize", str(folder), "--q8_0")
    assert done.code == 1
    assert f"hint: llmcli quantize {folder} --q8_0 --allow-pickle\n" in done.err
    assert llmcli("quantize", str(folder), "--q8_0", "--allow-pickle").code == 0


def running_children(folder: Path) -> list[int]:
    """Return the processes that convert a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if b"llama_converter.child" in words and str(folder).encode() in words:
            found.append(int(path.parent.name))
    return found


def is_ready(handle: int) -> bool:
    """Wait until a pipe or a process has something to read."""
    return bool(select.select([handle], [], [], 60)[0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_converter_ends_with_llmcli(
    folder: Path, converter: Path, number: signal.Signals, tmp_path: Path
) -> None:
    (folder / "behavior").write_text("hangs")
    os.mkfifo(converter / "is_half")
    pipe = os.open(converter / "is_half", os.O_RDONLY | os.O_NONBLOCK)
    program = (
        "from llmcli.model_loader.llama_converter import run_converter; "
        "run_converter.PACKAGES = (); from llmcli.app import main; main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, "quantize", str(folder), "--q8_0"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        stderr=subprocess.DEVNULL,
    )
    try:
        assert is_ready(pipe)
        (child,) = running_children(folder)
        handle = os.pidfd_open(child)
        process.send_signal(number)
        code = process.wait(60)
    finally:
        process.kill()
        process.wait()
        os.close(pipe)
    assert code == {signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}[number]
    assert is_ready(handle)
    os.close(handle)
    if number == signal.SIGINT:
        assert leftovers() == []


@pytest.mark.parametrize("command", ["pull", "quantize"])
def test_a_checkpoint_on_the_hub_is_downloaded_whole(
    llmcli: Any,
    folder: Path,
    converter: Path,
    monkeypatch: pytest.MonkeyPatch,
    home: Path,
    command: str,
) -> None:
    with Hub() as hub:
        hub.add("org/tiny", folder)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        done = llmcli(command, "org/tiny", "--q8_0", "--json")
        assert done.code == 0, done.err
        assert "org/tiny is downloaded whole, because llama.cpp's converter reads files" in done.err
        path = Path(json.loads(done.out)["path"])
        assert path.is_relative_to(home)
        assert read_header.read_header(path).file_type == "Q8_0"
        done = llmcli(command, "org/tiny", "--q8_0", "--json")
        assert (done.code, Path(json.loads(done.out)["path"])) == (0, path)
        assert "convert " not in done.err
    assert leftovers() == []


def test_a_folder_can_be_run(llmcli: Any, folder: Path, converter: Path) -> None:
    done = llmcli("run", str(folder), "Once", "-n", "2", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["model"]["file_type"] == "Q4_K_M"


def test_a_folder_can_be_planned(llmcli: Any, folder: Path, converter: Path) -> None:
    done = llmcli("plan", str(folder), "--json")
    assert done.code == 0, done.err
    planned = json.loads(done.out)["weights_bytes"]
    assert "convert tiny" not in done.err
    assert leftovers() == []
    done = llmcli("quantize", str(folder), "--q4_k_m", "--dry-run", "--json")
    assert json.loads(done.out)["tensor_bytes"] == pytest.approx(planned, rel=0.3)


def test_a_checkpoint_on_the_hub_is_planned_without_its_weights(
    llmcli: Any, folder: Path, converter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = llmcli("plan", str(folder), "--json")
    expected = json.loads(done.out)["weights_bytes"]
    with Hub() as hub:
        hub.add("org/tiny", folder)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        done = llmcli("plan", "org/tiny", "--json")
        assert done.code == 0, done.err
        assert json.loads(done.out)["weights_bytes"] == expected
        assert "downloaded whole" not in done.err
        assert leftovers() == []
        # other programs may have downloaded other files of the commit, and deleted their contents
        (config_file,) = load_config().hub_cache.glob("models--org--tiny/snapshots/*/config.json")
        (config_file.parent / "original").mkdir()
        for name in ("pytorch_model.bin", "tiny-F32.gguf", "original/consolidated.00.pth"):
            (config_file.parent / name).symlink_to(config_file.parent / "deleted")
        done = llmcli("plan", "org/tiny", "--json")
        assert done.code == 0, done.err
    assert not list((load_config().data / "models").glob("*/manifest.json"))


def test_the_real_converter_plans_a_checkpoint_on_the_hub(
    llmcli: Any, folder: Path, real_converter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = json.loads(llmcli("plan", str(folder), "--json").out)["weights_bytes"]
    with Hub() as hub:
        hub.add("org/tiny", folder)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        done = llmcli("plan", "org/tiny", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["weights_bytes"] == expected


def test_no_conversion_waits_for_another_one(llmcli: Any, folder: Path, converter: Path) -> None:
    request = ConverterRequest(folder, "the model", "", ())
    with hold_scratch_folder(request, load_config()) as scratch:
        done = llmcli("quantize", str(folder), "--q8_0")
        (found,) = (load_config().cache / "conversions").glob("*/")
        assert found == scratch
    assert done.code == 0, done.err
    assert leftovers() == []


def test_a_hint_to_install_a_module_never_comes_from_the_checkpoint(
    llmcli: Any, folder: Path, converter: Path
) -> None:
    (folder / "behavior").write_text("imports")
    done = llmcli("quantize", str(folder), "--q8_0")
    assert done.err.endswith("hint: pull a GGUF of this model instead\n")


def test_calibrate_writes_the_statistics_of_the_same_model(
    llmcli: Any, folder: Path, converter: Path, stories_gguf: Path, tmp_path: Path
) -> None:
    words = ("calibrate", "--chunks", "1", "--ctx", "64", "-t", "1", "-o")
    out, expected = tmp_path / "a.gguf", tmp_path / "b.gguf"
    done = llmcli(*words, str(out), str(folder))
    assert (done.code, calls(converter)) == (0, 1), done.err
    assert llmcli(*words, str(expected), str(stories_gguf)).code == 0
    assert tensor_contents(out) == tensor_contents(expected)
    assert leftovers() == []


@pytest.mark.parametrize("words", [("--types", "q8_0,q4_0"), ("--types", "q4_0", "--fold", "awq")])
def test_pareto_compares_quantizations(
    llmcli: Any, folder: Path, converter: Path, words: tuple[str, ...]
) -> None:
    words = ("pareto", str(folder), "--chunks", "1", "--ctx", "64", "--seconds", "0", *words)
    done = llmcli(*words, "--json")
    assert (done.code, calls(converter)) == (0, 1), done.err
    points = json.loads(done.out)
    done = llmcli(*words, "--json")
    assert (done.code, json.loads(done.out)) == (0, points)
    assert ("convert tiny" in done.err) == ("--fold" in words)
    assert leftovers() == []


def test_pareto_refuses_wrong_settings_before_weights_are_converted(
    llmcli: Any, folder: Path, converter: Path
) -> None:
    done = llmcli("pareto", str(folder), "--types", "q9")
    assert done.code != 0
    assert "convert tiny" not in done.err


def test_both_models_of_an_evaluation_can_be_converted(
    llmcli: Any, folder: Path, converter: Path
) -> None:
    words = ("eval", str(folder), "--base", f"{folder}:Q8_0", "--chunks", "1", "--ctx", "64")
    done = llmcli(*words, "--json")
    assert (done.code, calls(converter)) == (0, 2), done.err


def test_leftovers_of_a_killed_conversion_are_garbage(
    llmcli: Any, folder: Path, converter: Path
) -> None:
    request = ConverterRequest(folder, "the model", "", ())
    with hold_scratch_folder(request, load_config()) as scratch:
        lock = scratch.with_suffix(".lock")
    left = scratch / "out" / "tiny.gguf"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    with file_lock.hold_lock(lock):
        assert cleanup.find_garbage(load_config()) == []
    assert [item.reason for item in cleanup.find_garbage(load_config(), delete=True)] == [
        "unfinished conversion"
    ]
    assert leftovers() == []


def test_the_real_converter_and_the_native_one_write_the_same_tensors(
    llmcli: Any, folder: Path, stories_gguf: Path, real_converter: Path
) -> None:
    done = llmcli("convert", str(folder), "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["converter"] == "llama.cpp"
    assert tensor_contents(Path(document["path"])) == tensor_contents(stories_gguf)
    classes = converter_classes.read_classes(real_converter)
    assert classes is not None
    assert len(classes.text) > 200
    assert len(classes.mmproj) > 50


@pytest.mark.parametrize(
    "words",
    [
        ("--target-bpw", "9", "--quick"),
        ("--q4_0", "--verify", "--verify-chunks", "1"),
        ("--q4_0", "--method", "search"),
        ("--q4_0", "--fold", "awq", "--imatrix", "{imatrix}", "--dry-run"),
        ("--q8_0", "--split-max-size", "1M"),
    ],
)
def test_the_other_options_of_quantize_apply(
    llmcli: Any,
    folder: Path,
    converter: Path,
    stories_gguf: Path,
    tmp_path: Path,
    words: tuple[str, ...],
) -> None:
    imatrix = tmp_path / "imatrix.gguf"
    upstream.write_gguf(imatrix, upstream.random_sums(stories_gguf))
    words = tuple(word.format(imatrix=imatrix) for word in words)
    done = llmcli("quantize", str(folder), "-o", str(tmp_path / "x.gguf"), "--json", *words)
    assert done.code == 0, done.err
    assert calls(converter) == 1
    document = json.loads(done.out)
    assert document["converter"] == "llama.cpp"
    assert ("certificate" in document) == ("--verify" in words)
    assert leftovers() == []


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": None},
        {"architectures": 5},
        {"architectures": [[]]},
        {"architectures": ["Other"], "text_config": {"architectures": "LlamaForCausalLM"}},
        {"architectures": ["Other"], "text_config": []},
    ],
)
def test_odd_classes_are_refused_in_one_line(
    llmcli: Any, folder: Path, converter: Path, changes: dict[str, Any]
) -> None:
    tiny_checkpoint.edit(folder / "config.json", model_type="other", **changes)
    done = llmcli("quantize", str(folder), "--q8_0")
    assert (done.code, len(done.err.splitlines())) == (1, 2), done.err
    assert "which neither llmcli nor llama.cpp's converter" in done.err
    assert calls(converter) == 0


def test_the_real_converter_runs_no_code_of_a_checkpoint(
    llmcli: Any, folder: Path, real_converter: Path, tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "tokenizer.model"):
        (folder / name).unlink()
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Tokenizer: ...\nclass Config: ...\n"
    (folder / "code.py").write_text(code)
    tiny_checkpoint.edit(
        folder / "config.json",
        architectures=["Qwen2ForCausalLM"],
        model_type="other",
        auto_map={"AutoConfig": "code.Config"},
    )
    tiny_checkpoint.edit(
        folder / "tokenizer_config.json",
        tokenizer_class="Tokenizer",
        auto_map={"AutoTokenizer": ["code.Tokenizer", None]},
    )
    done = llmcli("quantize", str(folder), "--converter", "llama.cpp")
    assert (done.code, "can only be read by Python code of its own" in done.err) == (1, True)
    assert not (tmp_path / "ran").exists()
