"""`llmcli quantize` on the command line: the table, the JSON document, default paths and errors."""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import pytest

from llmcli import app as application
from llmcli.config import load_config
from llmcli.model_loader import quantize_file
from llmcli.ui import UI
from quant.model_file import read_header
from quant.recipes import file_types
from tests.quant import predicting_checkpoint, tiny_gguf


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs a command and returns its exit code, stdout and stderr."""

    def run_command(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["llmcli", *map(str, words)])
        try:
            application.main()
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_command


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_gguf.llama(tmp_path / "Tiny-3L-F32.gguf", layers=3)


def test_gguf_is_quantized_to_its_folder_and_a_table_is_printed(
    run, model: Path, tmp_path: Path
) -> None:
    code, out, err = run("quantize", model, "--q4_k", "--threads", 1)
    assert code == 0
    out_path = tmp_path / "Tiny-3L-Q4_K_M.gguf"
    assert read_header.read_header(out_path).file_type == "Q4_K_M"
    assert "Q4_K means Q4_K_M" in err
    assert out.splitlines()[0].split() == [
        "type",
        "tensors",
        "before",
        "after",
        "bits/weight",
        "weight",
        "RMSE",
        "seconds",
    ]
    assert [line.split()[0] for line in out.splitlines()[1:-1]] == ["Q4_K", "Q6_K", "F32", "total"]
    assert str(out_path) in out.splitlines()[-1]
    assert " s)" in out.splitlines()[-1]


def test_checkpoint_folder_is_quantized_to_its_parent_folder(
    run, stories: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(stories, tmp_path / "stories260K")
    code, out, _ = run("quantize", folder, "--json", "-t", "q8_0")
    document = json.loads(out)
    assert code == 0
    assert document["path"] == str(tmp_path / "stories260K-Q8_0.gguf")
    assert document["bytes"] == Path(document["path"]).stat().st_size
    assert document["sha256"] == hashlib.sha256(Path(document["path"]).read_bytes()).hexdigest()
    assert (
        document["file_type"],
        document["tensors"],
        document["fallbacks"],
        document["requantized_from"],
    ) == (
        "Q8_0",
        47,
        5,
        [],
    )
    assert {name: row["tensors"] for name, row in document["types"].items()} == {
        "Q8_0": 31,
        "F16": 5,
        "F32": 11,
    }
    assert document["types"]["Q8_0"]["relative_rmse"] < 0.01


def test_repeated_command_writes_nothing_and_prints_a_note(
    run, model: Path, tmp_path: Path
) -> None:
    run("quantize", model, "--q8_0")
    out_path = tmp_path / "Tiny-3L-Q8_0.gguf"
    before = out_path.stat()
    untouched = (before.st_ino, before.st_mtime_ns, before.st_size)
    code, out, err = run("quantize", model, "--q8_0", "--json")
    after = out_path.stat()
    assert (code, (after.st_ino, after.st_mtime_ns, after.st_size)) == (0, untouched)
    assert json.loads(out)["present"]
    assert json.loads(out)["sha256"] == hashlib.sha256(out_path.read_bytes()).hexdigest()
    assert "nothing to do" in err
    assert not json.loads(run("quantize", model, "--q8_0", "--json", "--force")[1])["present"]


def test_dry_run_writes_nothing_and_reports_the_exact_size(
    run, model: Path, tmp_path: Path
) -> None:
    before = sorted(tmp_path.iterdir())
    code, out, _ = run("quantize", model, "--dry-run", "--json", "--q5_k_m")
    assert (code, sorted(tmp_path.iterdir())) == (0, before)
    planned = json.loads(out)
    assert planned["dry_run"]
    run("quantize", model, "--q5_k_m", "-o", tmp_path / "x.gguf")
    # the file does not contain its name, so another name has no effect on the size
    assert planned["bytes"] == (tmp_path / "x.gguf").stat().st_size


def test_quantized_source_gives_a_warning_and_needs_no_flag(
    run, model: Path, tmp_path: Path
) -> None:
    run("quantize", model, "--q5_1", "-o", tmp_path / "a.gguf")
    code, out, err = run("quantize", tmp_path / "a.gguf", "--q4_0")
    assert code == 0
    assert "warning: the source is already quantized (Q5_1" in err
    line = next(line for line in out.splitlines() if line.startswith("Q4_0"))
    assert 1 < float(line.split()[-2].rstrip("%")) < 20


def test_pattern_gives_its_tensors_another_type(run, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.gguf"
    assert run("quantize", model, "--q4_k_m", "--tensor-type", "ffn_up=q8_0", "-o", out)[0] == 0
    types = {tensor.name: tensor.type for tensor in read_header.read_header(out).tensors}
    assert {types[f"blk.{i}.ffn_up.weight"] for i in range(3)} == {"Q8_0"}


def test_types_of_the_head_and_the_embedding_can_be_set(run, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.gguf"
    words = ("--output-tensor-type", "q4_0", "--token-embedding-type", "bf16", "-o", out)
    assert run("quantize", model, "--q8_0", *words)[0] == 0
    types = {tensor.name: tensor.type for tensor in read_header.read_header(out).tensors}
    assert (types["output.weight"], types["token_embd.weight"]) == ("Q4_0", "BF16")
    assert run("quantize", model, "--q8_0", "--leave-output-tensor", "-o", out)[0] == 0
    assert {t.type for t in read_header.read_header(out).tensors if t.name == "output.weight"} == {
        "F32"
    }


def test_folds_are_chosen_reported_and_recorded_in_the_file(run, tmp_path: Path) -> None:
    from tests.quant.upstream import random_sums, write_gguf

    model = tiny_gguf.llama(tmp_path / "model.gguf", hidden=64, ff=128, layers=1)
    out, weights = tmp_path / "x.gguf", write_gguf(tmp_path / "imatrix.gguf", random_sums(model))
    code, stdout, err = run(
        "quantize", model, "--q4_0", "--imatrix", weights, "--fold", "awq,deal", "-o", out, "--json"
    )
    assert code == 0
    reported, recorded = (
        json.loads(stdout)["fold"],
        json.loads(str(read_header.read_header(out).metadata["llmcli.quantize.fold"])),
    )
    assert reported["kinds"] == ["awq", "deal"]
    assert recorded == {"digest": reported["digest"], "how": "awq,deal"}
    assert " sites, which lowers their sampled error" in err and "LoRA adapters" in err
    again = run(
        "quantize", model, "--q4_0", "--imatrix", weights, "--fold", "awq,deal", "-o", out, "--json"
    )[1]
    assert json.loads(again)["present"]


def test_imatrix_is_used_and_named_in_the_document(run, model: Path, tmp_path: Path) -> None:
    from tests.quant.upstream import random_sums, write_gguf

    out, weights = tmp_path / "x.gguf", write_gguf(tmp_path / "imatrix.gguf", random_sums(model))
    code, stdout, err = run("quantize", model, "--q4_0", "--imatrix", weights, "-o", out, "--json")
    assert code == 0
    document = json.loads(stdout)
    assert (document["imatrix"], document["without_importance"]) == (str(weights), 1)
    assert (
        "has no data for 1 tensor, quantized without importance weights: token_embd.weight" in err
    )
    assert read_header.read_header(out).metadata["quantize.imatrix.file"] == str(weights)[:127]
    assert json.loads(
        run("quantize", model, "--q4_0", "--imatrix", weights, "-o", out, "--json")[1]
    )["present"]
    assert not json.loads(run("quantize", model, "--q4_0", "-o", out, "--json")[1])["present"]


def test_dry_run_reports_the_exact_size_of_a_model_in_shards(
    run, model: Path, tmp_path: Path
) -> None:
    words = (
        "quantize",
        model,
        "--q8_0",
        "--split-max-size",
        "1M",
        "-o",
        tmp_path / "x.gguf",
        "--json",
    )
    planned = json.loads(run(*words, "--dry-run")[1])
    assert not list(tmp_path.glob("x*"))
    code, stdout, _ = run(*words)
    assert code == 0
    written = json.loads(stdout)
    paths = [str(path) for path in sorted(tmp_path.glob("x*"))]
    assert written["files"] == planned["files"] == paths
    assert len(written["files"]) == 2 and written["path"] == written["files"][0]
    n_bytes = sum(Path(file).stat().st_size for file in written["files"])
    assert written["bytes"] == planned["bytes"] == n_bytes
    assert json.loads(run(*words)[1])["present"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["{model}", "--split-max-size", "7"], 1, "'7' is no size of a shard"),
        (["{model}", "--iq2_xs"], 1, "IQ2_XS needs an importance matrix"),
        (["{model}", "--q4_0", "--imatrix", "{tmp}/no.gguf"], 1, "there is no file"),
        (["{model}", "--q4_0", "--imatrix", "{text}"], 1, "is no importance matrix"),
        (["{model}", "--output-tensor-type", "q9"], 1, "there is no tensor type 'q9'"),
        (["{model}", "--q8_0", "--q4_0"], 2, "several types given: --q8_0 and --q4_0"),
        (["{model}", "--type", "q4_m"], 1, "there is no type 'q4_m'"),
        (["{model}", "-t", "q4_m"], 2, "neither a number of threads nor a file type"),
        (["{model}", "--method", "magic"], 1, "unknown method 'magic'"),
        (["{model}", "--fold", "magic"], 1, "unknown fold 'magic'"),
        (["{model}", "--tensor-type", "x"], 1, "is not REGEX=TYPE"),
        (["{model}", "--tensor-type", "atn_v=q8_0"], 1, "'atn_v' matches no tensor"),
        (
            ["{model}", "-t", "f16", "--tensor-type", "attn_v=q8_0"],
            1,
            "matches no tensor that F16 would quantize",
        ),
        (["{model}", "-o", "{model}", "--q8_0"], 1, "is the source itself"),
        (["{model}", "-o", "{tmp}/no/x.gguf"], 1, "there is no folder"),
        (["{tmp}/no.gguf"], 1, "there is no file"),
        (["{tmp}"], 1, "has no config.json"),
        (["{cut}"], 1, "is truncated"),
        (["{text}"], 1, "is not a GGUF file"),
    ],
)
def test_error_is_one_line_and_a_hint(
    words, code, message, run, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "cut.gguf").write_bytes(model.read_bytes()[:-100])
    (tmp_path / "text.gguf").write_bytes(b"just some text that is long enough")
    paths = {
        "model": model,
        "tmp": tmp_path,
        "cut": tmp_path / "cut.gguf",
        "text": tmp_path / "text.gguf",
    }
    before = sorted(tmp_path.rglob("*"))
    exit_code, out, err = run("quantize", *(word.format(**paths) for word in words))
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (exit_code, out, len(errors)) == (code, "", 1)
    assert message in errors[0]
    assert "hint: " in err
    assert "Traceback" not in err
    assert sorted(tmp_path.rglob("*")) == before


def test_local_path_needs_no_catalog(run, model: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "llmcli.catalog.fetch", None)  # importing it would fail
    assert run("quantize", model, "--q8_0")[0] == 0


def test_model_of_the_catalog_is_quantized_into_the_store(
    run, stories: Path, home: Path, tmp_path: Path
) -> None:
    shutil.copytree(stories, tmp_path / "stories260K")
    assert run("alias", "lily", tmp_path / "stories260K")[0] == 0
    code, out, err = run("quantize", "lily", "--q8_0", "--json")
    assert code == 0, err
    out_path = Path(json.loads(out)["path"])
    assert out_path.is_relative_to(home)
    assert read_header.read_header(out_path).file_type == "Q8_0"
    assert str(out_path) in {entry["path"] for entry in json.loads(run("list", "--json")[1])}
    assert json.loads(run("quantize", "lily", "--q8_0", "--json")[1])["present"]


def test_every_file_type_has_a_flag(run) -> None:
    words = run("quantize", "--help")[1].split()
    assert {kind.flag for kind in file_types.FILE_TYPES.values()} <= set(words)


def test_quantize_file_prints_nothing_on_stdout(stories: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "new" / "place" / "stories.gguf"
    assert quantize_file.quantize_file(stories, "Q4_K_M", out, load_config(), UI()) == out
    assert read_header.read_header(out).file_type == "Q4_K_M"
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "bits per weight" in captured.err


def test_prediction_layers_are_written_unless_no_mtp_is_given(run, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: no checkpoint")
    folder = predicting_checkpoint.build("Qwen3_5ForCausalLM", tmp_path / "model")
    files = [tmp_path / "whole.gguf", tmp_path / "short.gguf"]
    code, _, err = run("quantize", folder, "--q4_k_m", "-o", files[0])
    assert code == 0
    assert "converted as block 4: 1 layer that predicts further tokens (MTP); --no-mtp" in err
    assert "are Q8_0, because no statistics" in err
    code, _, err = run("quantize", folder, "--q4_k_m", "--no-mtp", "-o", files[1])
    assert code == 0
    assert "left out: 1 layer that predicts further tokens (MTP)" in err
    whole, short = (
        {tensor.name: tensor.type for tensor in read_header.read_header(file).tensors}
        for file in files
    )
    assert short.items() < whole.items()
    assert {name for name in whole if name not in short} == {
        name for name in whole if name.startswith("blk.4.")
    }
    code, _, err = run("quantize", files[0], "--q8_0", "--no-mtp")
    assert code == 2
    assert "--no-mtp applies to checkpoint folders" in err
